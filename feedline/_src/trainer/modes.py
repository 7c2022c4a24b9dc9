"""Compiles a task in three modes: jit on one device, jit over a mesh, and pmap."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from feedline._src.trainer.task import Batch, Params, State, Task, rows_in

_log = logging.getLogger("feedline")

Mode = Literal["jit_single", "jit_multi", "pmap"]
Compute = Literal["float32", "bfloat16"]
AXIS = "data"
T = TypeVar("T")

Step = Callable[[State, Batch], tuple[State, jax.Array]]
Measure = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Practices:
    """How a step is compiled and run. What costs nothing is on by default: see docs/benchmarks.md.

    Attributes:
      donate_state: the new state takes the memory of the old one. False: both exist at the same time.
      compute: "bfloat16": the loss function gets the parameters and the batch cast to bfloat16, also in
        evaluations; the trained parameters, the gradients and the optimizer's state stay float32.
      shard_state: parameters and the optimizer's state are split over the devices among which rows are split
        (FSDP), each leaf along its largest axis that can be divided; XLA gathers what a layer needs. Only in
        "jit_multi".
      guard_transfers: after its first step, the loop runs under `jax.transfer_guard("disallow")`: an implicit
        transfer between host and devices is an error.

    Raises:
      ValueError: `compute` is unknown.

    Example:
      >>> Practices(compute="bfloat16").donate_state
      True
    """

    donate_state: bool = True
    compute: Compute = "float32"
    shard_state: bool = False
    guard_transfers: bool = True

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise ValueError(f"Practices.compute must be one of float32, bfloat16, got {self.compute!r}")


class Program(NamedTuple):
    """A task on its devices. Each function is compiled at its first call.

    Attributes:
      metrics: names of the means that `step` and `measure` return; the first is "loss".
      start: () → the state before the first step, the same bits on every device of every process.
      step: (state, batch) → the new state, and the metrics, float32 [len(metrics)], on every device.
      measure: (params, batch) → the metrics, and the number of the batch's valid rows, on every device.
      compile: () → the step, compiled now, and its `jax.stages.Compiled`, which has `memory_analysis`.
      steps_per_call: K. If K > 1, a call of `step` does K steps on leaves [K, B, ...], and returns metrics
        [K, len(metrics)].
    """

    mesh: Mesh
    metrics: tuple[str, ...]
    start: Callable[[], State]
    step: Step
    measure: Measure
    compile: Callable[[], tuple[Step, jax.stages.Compiled]]
    steps_per_call: int = 1


def mesh_for(mode: Mode) -> Mesh:
    """A mesh for a mode, with one axis "data": one device for `jit_single`, else all devices of all processes.

    Raises:
      ValueError: the mode is unknown, or is `jit_single` with several processes.

    Example:
      >>> mesh_for("jit_single").size
      1
    """
    _check_mode(mode)
    return Mesh(jax.devices()[: 1 if mode == "jit_single" else None], (AXIS,))


def compiled(
    task: Task, mode: Mode, spec: Any, practices: Practices = Practices(), steps_per_call: int = 1
) -> Program:
    """The program of `task` on the devices of `spec`, the spec of a feed's batches.

    With jit: one program for the mesh, which XLA partitions according to the batch's sharding.

    With pmap: one program on each device, with an explicit collective. The batch gets the leading axis that pmap
    maps: [B, ...] → [devices, B / devices, ...]. The reshape moves no row to another device if the rows are split
    over all axes of the mesh, in the order of the axes. The state is not mapped; with several processes its arrays
    are replicated over the devices of this process, not over the mesh.
    """
    _check_mode(mode)
    mesh = _mesh_of(spec)
    if mode == "jit_single" and mesh.size > 1:
        raise ValueError(
            f'mode "jit_single" trains on one device, but the batches lie on {mesh.size}; give the feed '
            'mesh_for("jit_single"), or use mode "jit_multi" or "pmap"'
        )
    if practices.shard_state and mode != "jit_multi":
        raise ValueError(
            f'shard_state needs mode "jit_multi", got "{mode}", which keeps the whole state on each device'
        )
    if mode == "pmap":
        mesh = Mesh(list(mesh.devices.flat), (AXIS,))  # pmap's own mesh; with another, a step would compile twice
    task = dataclasses.replace(
        task,
        compute=None if practices.compute == "float32" else practices.compute,
        axis=AXIS if mode == "pmap" else None,
    )
    rows_axis, one = 0, spec
    if steps_per_call > 1:
        rows_axis, one = 1, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), spec)
    params = jax.eval_shape(lambda key: _checked_arrays(task.init(key)), jax.random.key(0))
    _check_valid(task, params, one)

    def in_mesh(function: Callable[..., T]) -> Callable[..., T]:
        """Trace within the mesh: with Explicit axes, JAX needs the mesh to shard zeros in a gradient."""

        def traced(*arguments: Any) -> T:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*arguments)

        return traced

    like = jax.eval_shape(task.start)
    everywhere = NamedSharding(mesh, P())
    shardings = jax.tree.map(lambda leaf: everywhere, like)
    update: Any = task.update if steps_per_call == 1 else functools.partial(jax.lax.scan, task.update)
    donated = (0,) if practices.donate_state else ()
    if mode == "pmap":
        rows = rows_in(one)
        if rows % mesh.size:
            raise ValueError(
                f'mode "pmap" gives each of {mesh.size} devices the same number of rows, and a batch has {rows}; '
                f'use a batch size that is a multiple of {mesh.size}, or mode "jit_multi"'
            )
        mapped: dict[str, Any] = {"axis_name": AXIS, "out_axes": None, "devices": list(mesh.devices.flat)}
        step = jax.pmap(update, in_axes=(None, rows_axis), donate_argnums=donated, **mapped)
        measure = jax.pmap(task.measure, in_axes=(None, 0), **mapped)

        def by_device(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(*leaf.shape[:rows_axis], mesh.size, -1, *leaf.shape[rows_axis + 1 :])

        of_device = NamedSharding(mesh, P(*[None] * rows_axis, AXIS))
        split: Any = jax.jit(lambda batch: jax.tree.map(by_device, batch), out_shardings=of_device)
        given = jax.eval_shape(split, spec)
    else:
        if practices.shard_state and mesh.size > 1:
            shardings = _split_shardings(like, mesh, spec, rows_axis)
        step = jax.jit(in_mesh(update), donate_argnums=donated, out_shardings=(shardings, everywhere))
        measure = jax.jit(in_mesh(task.measure), out_shardings=everywhere)
        split, given = (lambda batch: batch), spec

    def compile() -> tuple[Step, jax.stages.Compiled]:
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like, shardings
        )
        done = step.lower(placed, given).compile()
        return lambda state, batch: done(state, split(batch)), done

    return Program(
        mesh,
        task.names(params, one),
        start=jax.jit(in_mesh(task.start), out_shardings=shardings),
        step=lambda state, batch: step(state, split(batch)),
        measure=lambda params, batch: measure(params, split(batch)),
        compile=compile,
        steps_per_call=steps_per_call,
    )


def _check_mode(mode: Mode) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode == "jit_single" and jax.process_count() > 1:
        raise ValueError(
            f'mode "jit_single" trains on one device of one process, but this run has '
            f'{jax.process_count()} processes; use mode "jit_multi" or "pmap"'
        )


def _checked_arrays(params: Params) -> Params:
    """The result of `init`, checked: all leaves must be arrays or numbers that a gradient can change."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_number = hasattr(leaf, "shape") or isinstance(leaf, float | complex)
        of = jnp.result_type(leaf) if is_number else type(leaf).__name__
        if isinstance(of, str) or not jnp.issubdtype(of, jnp.inexact):
            raise TypeError(
                f"init must return a tree of floating-point arrays: params{jax.tree_util.keystr(path)} is {of}, "
                "which a gradient cannot change; for a module of Equinox, return the first part of "
                "eqx.partition(module, eqx.is_inexact_array)"
            )
    return params


def _check_valid(task: Task, params: Params, spec: Any) -> None:
    """Refuse a `valid` that is no mask of the rows. Warn if the loss ignores it, because padding then counts."""
    if not isinstance(spec, Mapping) or "valid" not in spec:
        return
    valid, rows = spec["valid"], rows_in(spec)
    if valid.dtype != jnp.bool_ or valid.shape != (rows,):
        raise TypeError(
            f'the leaf "valid" must be bool [{rows}], False for rows that are padding, and here it is '
            f"{valid.dtype}{list(valid.shape)}; rename your leaf"
        )

    def with_valid(valid: jax.Array, params: Params, batch: Batch) -> Any:
        return task.means(params, {**batch, "valid": valid})

    traced = jax.make_jaxpr(with_valid)(valid, params, spec).jaxpr
    if not any(used is traced.invars[0] for equation in traced.eqns for used in equation.invars):
        _log.warning(
            'the batches have the leaf "valid", which is False for rows that must not count, but the loss does '
            "not use it, so these rows count; take means with feedline.trainer.mean_of_valid(values, batch)"
        )


def _mesh_of(spec: Any) -> Mesh:
    leaves = jax.tree.leaves(spec)
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    if isinstance(sharding, SingleDeviceSharding):
        return Mesh(list(sharding.device_set), (AXIS,))
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"training needs batches on a mesh of devices, got {sharding}; give the feed "
            'NamedSharding(mesh, PartitionSpec("data"))'
        )
    return sharding.mesh


def _split_shardings(like: State, mesh: Mesh, spec: Any, rows_axis: int) -> State:
    """Shardings that split each leaf along its largest divisible axis, over the devices that share the rows."""
    of_batch = jax.tree.leaves(spec)[0].sharding.spec
    axes = of_batch[rows_axis] if len(of_batch) > rows_axis else None
    if axes is None:
        raise ValueError(
            "shard_state splits the state over the devices among which rows are split, but rows are not split; "
            'give the feed a sharding over an axis of the mesh, such as PartitionSpec("data")'
        )
    shards = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # -i: of equally long axes, the first
        length, axis = max(((n, -i) for i, n in enumerate(leaf.shape) if n % shards == 0), default=(0, 0))
        return NamedSharding(mesh, P(*[None] * -axis, axes) if length else P())

    split: State = jax.tree.map(sharding, like)
    return split
