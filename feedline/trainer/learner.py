"""A training step as pure functions of state and batch, without devices.

A batch is a dict with B rows:
  image  [B, ...]   any numeric dtype
  label  int [B]    0 … classes − 1
  valid  bool [B]   optional; rows where it is False are ignored
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Batch = Mapping[str, jax.Array]
Total = Callable[[Any], Any]


class State(NamedTuple):
    """The trainer's state: a pytree, the same on every device."""

    parameters: Any
    optimizer: Any
    step: jax.Array  # int32 [], steps done: a checkpoint's feed must have delivered as many batches


class Sums(NamedTuple):
    """Sums over the valid rows of a batch, as arrays of shape []."""

    loss: jax.Array  # float32, softmax cross entropy
    correct: jax.Array  # int32, rows whose highest score is that of their label
    rows: jax.Array  # int32


def unreduced(part: Any) -> Any:
    """The `Total` of a function that is given the global batch: its sums are already totals."""
    return part


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model and its optimizer.

    Attributes:
      make_model: builds the model, the same one at every call: it contains the seed.
      optimizer: an optax transformation.

    Example:
      >>> from feedline.trainer.model import MLP, Sizes
      >>> sizes = Sizes(features=4, classes=3)
      >>> learner = Learner(lambda: MLP(sizes, rngs=nnx.Rngs(0)), optax.adam(1e-3))
      >>> batch = {"image": jnp.ones((2, 4)), "label": jnp.array([0, 2])}
      >>> state, loss = jax.jit(learner.update)(learner.init(), batch)
      >>> loss.shape
      ()
    """

    make_model: Callable[[], nnx.Module]
    optimizer: optax.GradientTransformation

    def init(self) -> State:
        """The state before the first step."""
        parameters = nnx.state(self.make_model(), nnx.Param)
        return State(parameters, self.optimizer.init(parameters), jnp.zeros((), jnp.int32))

    def update(self, state: State, batch: Batch, total: Total = unreduced) -> tuple[State, jax.Array]:
        """One step. Returns the new state, and the batch's mean loss before the step, float32 [].

        Loss and gradient are summed over the local rows, then over all devices, and divided by the number of
        valid rows on all devices. So devices may hold different numbers of valid rows.

        Args:
          total: sums a pytree over the devices that each see a part of the batch.
        """

        def summed_loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
            sums = self.sums(parameters, batch)
            return sums.loss, sums.rows

        (loss, rows), gradient = jax.value_and_grad(summed_loss, has_aux=True)(state.parameters)
        loss, rows, gradient = total((loss, rows, gradient))
        loss, gradient = jax.tree.map(lambda summed: summed / jnp.maximum(rows, 1), (loss, gradient))
        change, optimizer = self.optimizer.update(gradient, state.optimizer, state.parameters)
        return State(optax.apply_updates(state.parameters, change), optimizer, state.step + 1), loss

    def sums(self, parameters: Any, batch: Batch) -> Sums:
        """The sums of a batch.

        The loss of a row with scores z is log Σ_c exp z_c − z_label.

        Raises:
          ValueError, TypeError: during tracing, if the batch does not have the leaves above.
        """
        _check(batch)
        model = nnx.merge(nnx.graphdef(nnx.eval_shape(self.make_model)), parameters)
        scores = model(batch["image"])
        label = batch["label"]
        valid = batch.get("valid", jnp.ones(label.shape, bool))
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, label)
        return Sums(
            loss=jnp.where(valid, losses, 0).sum(),
            correct=(valid & (scores.argmax(axis=-1) == label)).sum(dtype=jnp.int32),
            rows=valid.sum(dtype=jnp.int32),
        )


def _check(batch: Batch) -> None:
    if not isinstance(batch, Mapping) or not {"image", "label"} <= set(batch):
        found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(f'a batch must be a dict with "image" and "label", got {found}; rename its leaves')
    image, label, valid = batch["image"], batch["label"], batch.get("valid")
    if label.ndim != 1 or not jnp.issubdtype(label.dtype, jnp.integer):
        raise TypeError(
            f"label must be one integer a row, int [B], got {label.dtype}{list(label.shape)}; "
            "turn one-hot labels into class numbers with argmax(axis=-1)"
        )
    if image.ndim < 2 or len(image) != len(label):
        raise ValueError(
            f"image must be [B, ...] with the B = {len(label)} rows of label, got {list(image.shape)}; "
            "give every row its image"
        )
    if valid is not None and (valid.dtype != jnp.bool_ or valid.shape != label.shape):
        raise TypeError(f"valid must be bool [{len(label)}], got {valid.dtype}{list(valid.shape)}")
