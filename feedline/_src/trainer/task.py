"""What is trained, as pure functions without devices: initial state, one step, metrics of a batch.

A batch is a tree of arrays whose first axis is that of the rows, as a feed delivers it. If it is a dict with the
leaf `valid`, bool [B], the rows where that is False are padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

Batch = Any
Params = Any
Metrics = Mapping[str, jax.Array]
Init = Callable[[jax.Array], Params]
"""key → parameters."""
Loss = Callable[[Params, Batch], tuple[jax.Array, Metrics]]
"""(parameters, batch) → (mean loss [], means of other metrics, each [])."""
Remat = Literal["none", "all", "cheap"]
"""Which results of a layer are computed again for the gradient: "none"; "all", so that only the layer's input is
kept; "cheap", so that its matrix product is kept, too."""


class State(NamedTuple):
    """What training changes: a tree of global arrays."""

    params: Params
    optimizer: Any
    step: jax.Array  # int32 [], steps done: a checkpoint's feed must have delivered as many batches


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its optimizer.

    Attributes:
      init: key → parameters, a tree of arrays.
      loss: (parameters, batch) → (loss, metrics): the mean loss over the valid rows, float [], and a dict of other
        means over them, each []. With pmap it is called with the rows of one device, and the means of the devices
        are averaged, each weighted by its number of valid rows.
      optimizer: an optax transformation.
      seed: of the key for `init`.
      compute: dtype to which floating-point parameters and leaves of the batch are cast for the loss function.
        None: as they are. Gradients have the dtype of the parameters.

    Example:
      >>> task = Task(
      ...     init=lambda key: {"slope": jnp.zeros(())},
      ...     loss=lambda params, batch: (jnp.mean((params["slope"] * batch["x"] - batch["y"]) ** 2), {}),
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> batch = {"x": jnp.ones(4), "y": jnp.full(4, 3.0)}
      >>> state, metrics = jax.jit(task.update)(task.start(), batch)
      >>> float(metrics["loss"]), round(float(state.params["slope"]), 1)
      (9.0, 0.6)
    """

    init: Init
    loss: Loss
    optimizer: optax.GradientTransformation
    seed: int = 0
    compute: Any = None

    def start(self) -> State:
        """The state before the first step."""
        params = self.init(jax.random.key(self.seed))
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: State, batch: Batch, axis: str | None = None) -> tuple[State, Metrics]:
        """One step. Returns the new state, and the batch's metrics before the step with "loss" the first of them.

        Args:
          axis: of `jax.pmap`, over whose devices the rows are split. None: `batch` has all rows.

        Raises:
          TypeError: during tracing, if loss or metrics are not scalars.
        """
        ((_, metrics), gradient) = jax.value_and_grad(self.means, has_aux=True)(state.params, batch)
        metrics, gradient = _mean_over(axis, (metrics, gradient), valid_rows(batch))
        gradient = jax.tree.map(jnp.conj, gradient)  # JAX's gradient of complex parameters points uphill
        change, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, change), optimizer, state.step + 1), metrics

    def measure(self, params: Params, batch: Batch, axis: str | None = None) -> tuple[Metrics, jax.Array]:
        """The metrics of a batch, "loss" among them, and the number of its valid rows, int32 []."""
        rows = valid_rows(batch)
        metrics = _mean_over(axis, self.means(params, batch)[1], rows)
        return metrics, rows if axis is None else jax.lax.psum(rows, axis)

    def means(self, params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What the loss function gives for a batch, checked: the loss, and all metrics with "loss" the first."""
        if self.compute is not None:
            params, batch = jax.tree.map(self._cast, (params, batch))
        loss, others = _checked(self.loss(params, batch))
        loss = loss.astype(jnp.float32)
        metrics = {"loss": loss, **others}
        return loss, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    def _cast(self, leaf: jax.Array) -> jax.Array:
        return leaf.astype(self.compute) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _mean_over(axis: str | None, means: Any, rows: jax.Array) -> Any:
    """A tree's mean over the devices of an axis of `jax.pmap`, each weighted by its rows; None: as it is."""
    if axis is None:
        return means
    share = rows / jnp.maximum(jax.lax.psum(rows, axis), 1)  # at most 1: sums would overflow float16

    def weighted(mean: jax.Array) -> jax.Array:
        # a device whose rows are all padding may have divided by zero
        return jnp.where(rows > 0, mean * share.astype(mean.dtype), jnp.zeros_like(mean))

    return jax.lax.psum(jax.tree.map(weighted, means), axis)


@jax.jit
def _all_finite(params: Params) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)], bool).all()


def all_finite(params: Params) -> bool:
    """Whether all parameters are finite. Waits for them."""
    return bool(jax.device_get(_all_finite(params)))


def rows_in(batch: Batch, batches: int = 1) -> int:
    """Rows of a batch: the length of its first leaf. With several batches its leaves are [batches, B, ...]."""
    shape = jax.tree.leaves(batch)[0].shape
    return int(shape[0] if batches == 1 else shape[0] * shape[1])


def valid_rows(batch: Batch) -> jax.Array:
    """The number of rows of a batch that are not padding, int32 []."""
    if isinstance(batch, Mapping) and "valid" in batch:
        return jnp.sum(batch["valid"], dtype=jnp.int32)
    return jnp.asarray(rows_in(batch), jnp.int32)


def mean_of_valid(values: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The mean of one value for each row, [B], over the rows of a batch that are not padding; 0 if all are.

    Example:
      >>> batch = {"valid": jnp.array([True, True, False])}
      >>> float(mean_of_valid(jnp.array([1.0, 3.0, 100.0]), batch))
      2.0
    """
    if "valid" not in batch:
        return values.mean()
    valid = batch["valid"]
    return jnp.where(valid, values, 0).sum() / jnp.maximum(valid.sum(), 1)


def rematerialised(layer: Callable[..., jax.Array], remat: Remat) -> Callable[..., jax.Array]:
    """A layer of a model, of which some results are computed again for the gradient instead of being kept.

    Args:
      layer: a pure function of arrays.

    Raises:
      ValueError: `remat` is unknown.

    Example:
      >>> rematerialised(jax.numpy.sin, "none") is jax.numpy.sin
      True
    """
    if remat not in get_args(Remat):
        raise ValueError(f"remat must be one of {', '.join(get_args(Remat))}, got {remat!r}")
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "cheap" else None
    done: Callable[..., jax.Array] = jax.checkpoint(layer, policy=policy)
    return done


def _checked(result: Any) -> tuple[jax.Array, Metrics]:
    """What a loss function returned, if it is a pair of a scalar and a dict of scalars."""
    rule = "loss(params, batch) must return (loss, metrics): a float scalar and a dict of scalars, {} for none"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        of = f"({', '.join(type(each).__name__ for each in result)})" if isinstance(result, tuple) else ""
        raise TypeError(f"{rule}; it returned {of or type(result).__name__}")
    loss, metrics = result
    for name in metrics:
        if not isinstance(name, str) or name in ("loss", "step") or name.startswith("eval_"):
            raise TypeError(f"{rule}; {name!r} is no string, or means something else in the history: rename it")
    for name, value in {"loss": loss, **metrics}.items():
        if isinstance(value, Mapping | list | tuple):
            raise TypeError(f"{rule}; its {name} is a {type(value).__name__}: give each number a name of its own")
        if shape := jnp.shape(value):
            raise TypeError(f"{rule}; its {name} has the shape {list(shape)}: take the mean over the rows")
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"{rule}; its loss is {loss.dtype}")
    return loss, metrics
