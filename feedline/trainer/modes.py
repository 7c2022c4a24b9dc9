"""Compiles a task in three modes: jit on one device, jit over a mesh, and pmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from feedline.trainer.task import Average, Batch, Metrics, Params, State, Task, of_whole_batch, over_devices

Mode = Literal["jit_single", "jit_multi", "pmap"]
AXIS = "data"

Step = Callable[[State, jax.Array, Batch], tuple[State, jax.Array]]
Measure = Callable[[Params, Batch], tuple[Metrics, jax.Array]]


class Program(NamedTuple):
    """A task on its devices. Each function is compiled at its first call.

    Attributes:
      mesh: the devices.
      metrics: names of what a step measures; the first is "loss".
      start: () → the state before the first step, the same bits on every device of every process.
      recent: steps → an array for the metrics of that many steps, float32 [steps, len(metrics)], on every device.
      step: (state, recent, batch) → the new state, and `recent` with this step's metrics in row
        `state.step % len(recent)`. The argument `state` is donated.
      measure: (params, batch) → the batch's metrics, and its number of valid rows on all devices.
      compile: steps of recent metrics → the step compiled now, and what the compiler says of it, such as its
        memory on each device (`memory_analysis`).
    """

    mesh: Mesh
    metrics: tuple[str, ...]
    start: Callable[[], State]
    recent: Callable[[int], jax.Array]
    step: Step
    measure: Measure
    compile: Callable[[int], tuple[Step, jax.stages.Compiled]]


def mesh_for(mode: Mode) -> Mesh:
    """The devices of a mode, on one axis "data": the first for `jit_single`, else all of all processes.

    Raises:
      ValueError: the mode is unknown, or is `jit_single` with several processes.
    """
    _check_mode(mode)
    return Mesh(jax.devices()[: 1 if mode == "jit_single" else None], (AXIS,))


def compiled(task: Task, mode: Mode, spec: Any) -> Program:
    """`task` for the devices of a feed.

    Args:
      spec: the batches as `jax.ShapeDtypeStruct`s with shardings, as `feed.spec`.

    Raises:
      ValueError: the mode is unknown, or does not fit the batches' shardings.

    Example:
      >>> import optax
      >>> task = Task(
      ...     init=lambda key: {"slope": jnp.zeros(())},
      ...     loss=lambda params, batch: (jnp.mean((params["slope"] * batch["x"] - 3) ** 2), {}),
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> batch = {"x": jax.device_put(jnp.ones(8), NamedSharding(mesh_for("jit_multi"), P("data")))}
      >>> program = compiled(task, "jit_multi", batch)
      >>> state, recent = program.step(program.start(), program.recent(1), batch)
      >>> program.metrics, float(recent[0, 0])
      (('loss',), 9.0)
    """
    _check_mode(mode)
    mesh = _mesh_of(spec)
    if mode == "jit_single" and mesh.size > 1:
        raise ValueError(
            f'mode "jit_single" trains on one device, but the batches lie on {mesh.size}; give the feed '
            'mesh_for("jit_single"), or use mode "jit_multi" or "pmap"'
        )
    state = jax.eval_shape(task.start)
    names = tuple(jax.eval_shape(task.measure, state.params, spec)[0])
    # jit and eval_shape sort the names of a dict
    names = ("loss", *(name for name in names if name != "loss"))
    return _pmapped(task, mesh, names, spec) if mode == "pmap" else _jitted(task, mesh, names, spec)


def _check_mode(mode: Mode) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode == "jit_single" and jax.process_count() > 1:
        raise ValueError(
            f'mode "jit_single" trains on one device of one process, but this run has '
            f'{jax.process_count()} processes; use mode "jit_multi" or "pmap"'
        )


def _mesh_of(spec: Any) -> Mesh:
    """The mesh of the batches' shardings."""
    sharding = jax.tree.leaves(spec)[0].sharding
    if isinstance(sharding, SingleDeviceSharding):
        return Mesh(list(sharding.device_set), (AXIS,))
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"training needs batches on a mesh of devices, got {sharding}; give the feed "
            'NamedSharding(mesh, PartitionSpec("data"))'
        )
    return sharding.mesh


def _recording(task: Task, names: tuple[str, ...], average: Average = of_whole_batch) -> Step:
    """`task.update` that writes the metrics into an array of recent ones."""

    def step(state: State, recent: jax.Array, batch: Batch) -> tuple[State, jax.Array]:
        after, metrics = task.update(state, batch, average)
        row = jnp.stack([metrics[name] for name in names])
        return after, jax.lax.dynamic_update_index_in_dim(recent, row, state.step % len(recent), 0)

    return step


def _jitted(task: Task, mesh: Mesh, names: tuple[str, ...], spec: Any) -> Program:
    """One program for the mesh: XLA partitions it by the batch's sharding, and inserts the collectives."""
    everywhere = NamedSharding(mesh, P())
    start = jax.jit(task.start, out_shardings=everywhere)
    recent = _zeros(names, everywhere)
    step = jax.jit(_recording(task, names), donate_argnums=0, out_shardings=everywhere)

    def compile(steps: int) -> tuple[Step, jax.stages.Compiled]:
        done = step.lower(*_placed(task, names, steps, everywhere), spec).compile()
        return done, done

    measure = jax.jit(task.measure, out_shardings=everywhere)
    return Program(mesh, names, start, recent, step, measure, compile)


def _pmapped(task: Task, mesh: Mesh, names: tuple[str, ...], spec: Any) -> Program:
    """One program on each device, with an explicit collective.

    The batch gets the leading axis that pmap maps: [B, ...] → [devices, B / devices, ...]; no row moves to
    another device. The state is not mapped; with several processes its arrays are replicated over the devices of
    this process, not over the mesh.
    """
    _check_own_rows(spec, mesh)
    devices = list(mesh.devices.flat)
    flat = Mesh(devices, (AXIS,))
    average = over_devices(AXIS)
    pmap = functools.partial(jax.pmap, axis_name=AXIS, out_axes=None, devices=devices)
    step = pmap(_recording(task, names, average), in_axes=(None, None, 0), donate_argnums=0)

    def measured(params: Params, part: Batch) -> tuple[Metrics, jax.Array]:
        metrics, rows = task.measure(params, part, average)
        return metrics, jax.lax.psum(rows, AXIS)

    measure = pmap(measured, in_axes=(None, 0))
    by_device = jax.jit(
        lambda batch: jax.tree.map(lambda leaf: leaf.reshape(flat.size, -1, *leaf.shape[1:]), batch),
        out_shardings=NamedSharding(flat, P(AXIS)),
    )
    here = NamedSharding(flat.local_mesh, P())

    def compile(steps: int) -> tuple[Step, jax.stages.Compiled]:
        done = step.lower(*_placed(task, names, steps, here), jax.eval_shape(by_device, spec)).compile()
        return lambda state, recent, batch: done(state, recent, by_device(batch)), done

    return Program(
        mesh,
        names,
        start=jax.jit(task.start, out_shardings=here),
        recent=_zeros(names, here),
        step=lambda state, recent, batch: step(state, recent, by_device(batch)),
        measure=lambda params, batch: measure(params, by_device(batch)),
        compile=compile,
    )


def _placed(task: Task, names: tuple[str, ...], steps: int, sharding: NamedSharding) -> Any:
    """The state and the recent metrics as `jax.ShapeDtypeStruct`s with that sharding."""
    recent = jax.ShapeDtypeStruct((steps, len(names)), jnp.float32)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (jax.eval_shape(task.start), recent),
    )


def _zeros(names: tuple[str, ...], sharding: NamedSharding) -> Callable[[int], jax.Array]:
    def recent(steps: int) -> jax.Array:
        zeros: jax.Array = jax.jit(lambda: jnp.zeros((steps, len(names))), out_shardings=sharding)()
        return zeros

    return recent


def _check_own_rows(spec: Any, mesh: Mesh) -> None:
    """ValueError if not every device has rows of its own, in the mesh's order of the devices."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        rows = leaf.shape[0] // mesh.size
        begins = {d: index[0].start or 0 for d, index in leaf.sharding.devices_indices_map(leaf.shape).items()}
        shard = leaf.sharding.shard_shape(leaf.shape)
        if shard != (rows, *leaf.shape[1:]) or [begins[d] for d in mesh.devices.flat] != [
            i * rows for i in range(mesh.size)
        ]:
            name = jax.tree_util.keystr(path) or "the batch"
            raise ValueError(
                f'mode "pmap" gives each of {mesh.size} devices rows of its own, but {name} '
                f"{list(leaf.shape)} has shards {list(shard)} by {leaf.sharding.spec}; split its rows over all "
                'axes of the mesh, in their order, or use mode "jit_multi"'
            )
