"""Training as pure functions without devices: the initial state, one step, and the metrics of a batch.

A batch is a tree of arrays whose first axis counts the rows, as a feed delivers it. If it is a dict with the leaf
`valid`, bool [B], the rows where `valid` is False are padding.
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
"""Names that a metric of a loss function may not have: a report has columns with these names."""


class State(NamedTuple):
    """What training changes: a tree of global arrays.

    Attributes:
      params, optimizer: the parameters, and the state of the optax transformation.
      step: int32[], steps done: the same number as in the feed's state in a checkpoint.
    """

    params: Params
    optimizer: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its optimizer, as in `fit`.

    Attributes:
      seed: seed of the key for `init`.
      compute: dtype to which floating-point parameters and leaves of the batch are cast for the loss function.
        None: no cast. Gradients have the dtype of the parameters.
      axis: the axis name of `jax.pmap`: `loss` is called with the rows of one device, and the means of the devices
        are averaged, each weighted by its number of valid rows. None: `loss` is called with all rows.
    """

    init: Init
    loss: Loss
    optimizer: optax.GradientTransformation
    seed: int = 0
    compute: Any = None
    axis: str | None = None

    def start(self) -> State:
        params = self.init(jax.random.key(self.seed))
        # optax needs arrays, not Python's numbers
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), params)
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        """The state after one step, and the means of the batch, computed with the parameters before the step."""
        (_, means), gradient = jax.value_and_grad(self.means, has_aux=True)(state.params, batch)
        means, gradient = _mean_over(self.axis, (means, gradient), valid_rows(batch))
        gradient = jax.tree.map(jnp.conj, gradient)  # for complex parameters, JAX returns the conjugate
        change, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        # a scan and a resume need the dtypes of the start, and optax may return float32 for bfloat16
        optimizer = jax.tree.map(_as, optimizer, state.optimizer)
        return State(optax.apply_updates(state.params, change), optimizer, state.step + 1), means

    def measure(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The means of a batch, and the number of its valid rows, int32 []."""
        rows = valid_rows(batch)
        means = _mean_over(self.axis, self.means(params, batch)[1], rows)
        return means, rows if self.axis is None else jax.lax.psum(rows, self.axis)

    def means(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The loss of a batch, and all means, float32 [len(names)]. TypeError: a mean is not a scalar."""
        loss, metrics = self._computed(params, batch)
        return loss, jnp.stack([jnp.asarray(mean, jnp.float32) for mean in (loss, *metrics.values())])

    def names(self, params: Params, batch: Batch) -> tuple[str, ...]:
        """The names of the means. The first is "loss"."""
        return ("loss", *jax.eval_shape(self._computed, params, batch)[1])

    def _computed(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        if self.compute is not None:
            params, batch = jax.tree.map(self._cast, (params, batch))
        return _checked(self.loss(params, batch))

    def _cast(self, leaf: jax.Array) -> jax.Array:
        return leaf.astype(self.compute) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _as(new: jax.Array, old: jax.Array) -> jax.Array:
    return new if getattr(new, "dtype", None) == old.dtype else jnp.asarray(new, old.dtype)


def _mean_over(axis: str | None, means: Any, rows: jax.Array) -> Any:
    """The mean of each leaf over the devices of an axis of `jax.pmap`, with each device weighted by its rows."""
    if axis is None:
        return means
    share = rows / jnp.maximum(jax.lax.psum(rows, axis), 1)  # at most 1, whereas mean × rows may overflow float16

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
    """The mean of `values` [B], one per row, over the rows that are not padding; 0 if all rows are padding.

    Example:
      >>> batch = {"valid": jnp.array([True, True, False])}
      >>> float(mean_of_valid(jnp.array([1.0, 3.0, 100.0]), batch))
      2.0
    """
    valid = batch.get("valid")
    if values.ndim != 1 or (valid is not None and valid.shape != values.shape):
        rows = "B" if valid is None else len(valid)
        raise ValueError(
            f"mean_of_valid takes one value for each row, [{rows}], got {list(values.shape)}; average over the "
            "other axes first"
        )
    if valid is None:
        return values.mean()
    return jnp.where(valid, values, 0).sum() / jnp.maximum(valid.sum(), 1)


def _checked(result: Any) -> tuple[jax.Array, Metrics]:
    """What a loss function returned, checked: the loss in float32, and the metrics sorted by name."""

    def shown(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__

    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, metrics = result
        values = [loss, *metrics.values()]
        scalars = jax.tree_util.all_leaves(values) and all(jnp.shape(value) == () for value in values)
        named = all(isinstance(name, str) and name not in _RESERVED for name in metrics)
        named = named and not any(name.startswith("eval_") for name in metrics)
        if scalars and named and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            return jnp.asarray(loss, jnp.float32), dict(sorted(metrics.items()))
    raise TypeError(
        "loss(params, batch) must return (loss, metrics): the loss is a float scalar, the mean over the rows; the "
        f"metrics are a dict of scalars, {{}} for none, named by strings other than {', '.join(_RESERVED)} "
        f"and eval_…; it returned {jax.tree.map(shown, result)}"
    )
