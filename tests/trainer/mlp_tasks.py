"""The bundled MLP as the tests train it."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mlp_oracle import Rows

from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import Mode, Program, compiled, mesh_for
from feedline._src.trainer.task import Task


def task_of(sizes: Sizes, optimizer: optax.GradientTransformation | None = None, seed: int = 0) -> Task:
    return Task(*classifier(sizes), optimizer or optax.adam(3e-3), seed)


def sharding_of(mode: Mode) -> NamedSharding:
    return NamedSharding(mesh_for(mode), P("data"))


@functools.cache
def program_of(mode: Mode, sizes: Sizes, rows: int = 64, *, padded: bool = False) -> Program:
    """The program for batches of so many images of 8 × 8 bytes; `padded` batches have the leaf `valid`."""
    sharding = sharding_of(mode)
    shape = (8, 8) if sizes.features == 64 else (sizes.features,)
    spec = {
        "image": jax.ShapeDtypeStruct((rows, *shape), np.uint8, sharding=sharding),
        "label": jax.ShapeDtypeStruct((rows,), np.int32, sharding=sharding),
    }
    if padded:
        spec["valid"] = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=sharding)
    return compiled(task_of(sizes), mode, spec)


def placed(rows: Rows, mode: Mode) -> dict[str, jax.Array]:
    return jax.device_put(rows, sharding_of(mode))
