"""What is trained, as pure functions without devices: initial state, one step, metrics of a batch.

A batch is a tree of arrays whose first axis is that of the rows, as a feed delivers it. If it is a dict with the
leaf `valid`, bool [B], the rows where that is False are padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
_RESERVED = ("loss", "step", "rows_per_s", "wait_share")
"""Names of columns of a report, beside those of the metrics."""


class State(NamedTuple):
    """What training changes: a tree of global arrays."""

    params: Params
    optimizer: Any
    step: jax.Array  # int32 [], steps done: a checkpoint's feed must have delivered as many batches


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its optimizer, as in `fit`.

    With pmap, `loss` is called with the rows of one device; the means of the devices are averaged, each weighted
    by its number of valid rows.

    Attributes:
      seed: of the key for `init`.
      compute: dtype to which floating-point parameters and leaves of the batch are cast for the loss function.
        None: unchanged. Gradients have the dtype of the parameters.
    """

    init: Init
    loss: Loss
    optimizer: optax.GradientTransformation
    seed: int = 0
    compute: Any = None

    def start(self) -> State:
        params = self.init(jax.random.key(self.seed))
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: State, batch: Batch, axis: str | None = None) -> tuple[State, Metrics]:
        """One step, and the metrics of the batch before it. `axis`: that of `jax.pmap` which splits the rows."""
        (_, metrics), gradient = jax.value_and_grad(self.means, has_aux=True)(state.params, batch)
        metrics, gradient = _mean_over(axis, (metrics, gradient), valid_rows(batch))
        gradient = jax.tree.map(jnp.conj, gradient)  # JAX's gradient of complex parameters points uphill
        change, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, change), optimizer, state.step + 1), metrics

    def measure(self, params: Params, batch: Batch, axis: str | None = None) -> tuple[Metrics, jax.Array]:
        """The metrics of a batch, and the number of its valid rows, int32 []."""
        rows = valid_rows(batch)
        metrics = _mean_over(axis, self.means(params, batch)[1], rows)
        return metrics, rows if axis is None else jax.lax.psum(rows, axis)

    def means(self, params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of a batch, and all metrics with "loss" first. TypeError if they are not scalars."""
        if self.compute is not None:
            params, batch = jax.tree.map(self._cast, (params, batch))
        loss, others = _checked(self.loss(params, batch))
        return loss, {name: jnp.asarray(value, jnp.float32) for name, value in {"loss": loss, **others}.items()}

    def _cast(self, leaf: jax.Array) -> jax.Array:
        return leaf.astype(self.compute) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _mean_over(axis: str | None, means: Any, rows: jax.Array) -> Any:
    """A tree's mean over the devices of an axis of `jax.pmap`, each weighted by its rows."""
    if axis is None:
        return means
    share = rows / jnp.maximum(jax.lax.psum(rows, axis), 1)  # at most 1: sums would overflow float16

    def weighted(mean: jax.Array) -> jax.Array:
        # a device whose rows are all padding may have divided by zero
        return jnp.where(rows > 0, mean * share.astype(mean.dtype), jnp.zeros_like(mean))

    return jax.lax.psum(jax.tree.map(weighted, means), axis)


@jax.jit
def all_finite(params: Params) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)], bool).all()


def rows_in(batch: Batch, batches: int = 1) -> int:
    """Rows of a batch, or of several with the leaves [batches, B, ...]."""
    return math.prod(jax.tree.leaves(batch)[0].shape[: 1 if batches == 1 else 2])


def valid_rows(batch: Batch) -> jax.Array:
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


def _checked(result: Any) -> tuple[jax.Array, Metrics]:
    """The loss in float32, and the metrics, of what a loss function returned."""

    def shown(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__

    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, metrics = result
        values = [loss, *metrics.values()]
        scalars = jax.tree_util.all_leaves(values) and all(jnp.shape(value) == () for value in values)
        named = all(isinstance(name, str) and name not in _RESERVED for name in metrics)
        named = named and not any(name.startswith("eval_") for name in metrics)
        if scalars and named and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            return jnp.asarray(loss, jnp.float32), metrics
    raise TypeError(
        "loss(params, batch) must return (loss, metrics): the mean over the rows, a float scalar, and a dict of "
        f"scalars, {{}} for none, whose names are strings other than {', '.join(_RESERVED)} and eval_…; "
        f"it returned {jax.tree.map(shown, result)}"
    )
