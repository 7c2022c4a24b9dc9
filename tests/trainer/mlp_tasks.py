"""The bundled MLP as the tests train it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import Mode, Program, compiled, mesh_for
from feedline._src.trainer.task import Task

Rows = dict[str, NDArray[Any]]


def task_of(sizes: Sizes, optimizer: optax.GradientTransformation | None = None, seed: int = 0) -> Task:
    return Task(*classifier(sizes), optimizer or optax.adam(3e-3), seed)


def sharding_of(mode: Mode) -> NamedSharding:
    return NamedSharding(mesh_for(mode), P("data"))


@functools.cache
def program_of(mode: Mode, sizes: Sizes, rows: int = 64, *, padded: bool = False) -> Program:
    """The program for batches of `rows` images of 8 × 8 bytes; `padded` batches have the leaf `valid`."""
    sharding = sharding_of(mode)
    spec = {
        "image": jax.ShapeDtypeStruct((rows, 8, 8), np.uint8, sharding=sharding),
        "label": jax.ShapeDtypeStruct((rows,), np.int32, sharding=sharding),
    }
    if padded:
        spec["valid"] = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=sharding)
    return compiled(task_of(sizes), mode, spec)


def placed(rows: Rows, mode: Mode) -> dict[str, jax.Array]:
    return jax.device_put(rows, sharding_of(mode))


def made_up_rows(count: int, seed: int = 0) -> Rows:
    """Random bytes with random labels: {"image": uint8 [count, 8, 8], "label": int32 [count]}."""
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(256, size=(count, 8, 8), dtype=np.uint8),
        "label": random.integers(10, size=count, dtype=np.int32),
    }
