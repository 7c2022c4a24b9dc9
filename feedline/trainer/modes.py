"""Compiles a learner in three modes: jit on one device, jit over a mesh, and pmap.

All three take the same batches, and replicate the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline.trainer.learner import Batch, Learner, State, Sums

Mode = Literal["jit_single", "jit_multi", "pmap"]
AXIS = "data"

Step = Callable[[State, Batch], tuple[State, jax.Array]]


class Compiled(NamedTuple):
    """A learner on its devices. Each function is compiled at its first call.

    Attributes:
      sharding: of every leaf of a batch: the rows are split over the devices.
      init: () → the state before the first step, the same bits on every device of every process.
      step: (state, batch) → (state, mean loss []); the argument `state` is donated.
      sums: (parameters, batch) → `Sums`, for `evaluate`.
    """

    sharding: NamedSharding
    init: Callable[[], State]
    step: Step
    sums: Callable[[Any, Batch], Sums]


def mesh_for(mode: Mode) -> Mesh:
    """The devices of a mode, on one axis: the first for `jit_single`, else all of all processes.

    Raises:
      ValueError: the mode is unknown, or is `jit_single` with several processes.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode != "jit_single":
        return Mesh(jax.devices(), (AXIS,))
    if jax.process_count() > 1:
        raise ValueError(
            f'mode "jit_single" trains on one device of one process, but this run has '
            f'{jax.process_count()} processes; use mode "jit_multi" or "pmap"'
        )
    return Mesh(jax.devices()[:1], (AXIS,))


def compiled(learner: Learner, mode: Mode) -> Compiled:
    """`learner` for the devices of `mode`.

    Example:
      >>> import numpy as np, optax
      >>> from flax import nnx
      >>> from feedline.trainer.model import MLP, Sizes
      >>> sizes = Sizes(features=4, classes=3)
      >>> run = compiled(Learner(lambda: MLP(sizes, rngs=nnx.Rngs(0)), optax.adam(1e-3)), "jit_single")
      >>> batch = {"image": np.ones((8, 4), np.uint8), "label": np.zeros(8, np.int32)}
      >>> state, loss = run.step(run.init(), jax.device_put(batch, run.sharding))
      >>> round(float(loss), 1)
      1.1
    """
    mesh = mesh_for(mode)
    return _pmapped(learner, mesh) if mode == "pmap" else _jitted(learner, mesh)


def _jitted(learner: Learner, mesh: Mesh) -> Compiled:
    """One program for the mesh: XLA partitions it by the batch's sharding, and inserts the collectives."""
    everywhere = NamedSharding(mesh, P())
    return Compiled(
        sharding=NamedSharding(mesh, P(AXIS)),
        init=jax.jit(learner.init, out_shardings=everywhere),
        step=jax.jit(learner.update, donate_argnums=0, out_shardings=everywhere),
        sums=jax.jit(learner.sums, out_shardings=everywhere),
    )


def _pmapped(learner: Learner, mesh: Mesh) -> Compiled:
    """One program on each device, with an explicit collective.

    The batch gets the leading axis that pmap maps: [B, ...] → [devices, B / devices, ...]; no row moves to
    another device. The state is not mapped; with several processes its arrays are replicated over the devices of
    this process, not over the mesh.
    """
    sharding = NamedSharding(mesh, P(AXIS))
    total = functools.partial(jax.lax.psum, axis_name=AXIS)
    pmap = functools.partial(
        jax.pmap, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=list(mesh.devices.flat)
    )
    update = pmap(lambda state, part: learner.update(state, part, total), donate_argnums=0)
    sums = pmap(lambda parameters, part: total(learner.sums(parameters, part)))

    @functools.partial(jax.jit, out_shardings=sharding)
    def by_device(batch: Batch) -> Batch:
        return {name: leaf.reshape(mesh.size, -1, *leaf.shape[1:]) for name, leaf in batch.items()}

    return Compiled(
        sharding=sharding,
        init=jax.jit(learner.init, out_shardings=NamedSharding(mesh.local_mesh, P())),
        step=lambda state, batch: update(state, by_device(batch)),
        sums=lambda parameters, batch: sums(parameters, by_device(batch)),
    )
