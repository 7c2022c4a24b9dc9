"""Shardings for a case to run on, each for any number of devices that four divides.

Each is one sharding, or a tree of shardings, for a batch with the leaves x [B, 8], y [B] and z [B, 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def _data(devices: Any) -> Any:
    """Each device has rows of its own."""
    return NamedSharding(Mesh(devices, ("data",)), P("data"))


def _permuted(devices: Any) -> Any:
    """Each device has rows of its own. Later processes come first; rows of one process are not adjacent."""
    return _data(devices.reshape(2, -1).T.ravel()[::-1])


def _model(devices: Any) -> Any:
    """Half of the rows on each half of the devices: 4 processes are two pairs of replicas."""
    return NamedSharding(Mesh(devices.reshape(2, -1), ("data", "model")), P("data"))


def _model_across(devices: Any) -> Any:
    """Adjacent devices hold different halves of the rows: 2 processes are replicas, and need all rows."""
    return NamedSharding(Mesh(devices.reshape(-1, 2).T, ("data", "model")), P("data"))


def _flattened(devices: Any) -> Any:
    """The rows are divided over both axes of a mesh, the minor axis first."""
    return NamedSharding(Mesh(devices.reshape(2, -1), ("data", "model")), P(("model", "data")))


def _by_sequence(mesh: Mesh) -> Any:
    rows = NamedSharding(mesh, P("data"))
    return {"x": NamedSharding(mesh, P("data", "sequence")), "y": rows, "z": rows}


def _sequence(devices: Any) -> Any:
    """One leaf is cut along rows and columns, the others along rows."""
    return _by_sequence(Mesh(devices.reshape(2, -1), ("data", "sequence")))


def _skewed(devices: Any) -> Any:
    """The same, but the shards of one process form no rectangle. With 2 x 4 devices, the owners are

    0 0 1 1
    1 0 0 1
    """
    grid = devices.reshape(-1, 2).T.copy()
    grid[1] = np.roll(grid[1], 1)
    return _by_sequence(Mesh(grid, ("data", "sequence")))


def _one_leaf_everywhere(devices: Any) -> Any:
    """Every process needs all rows of one leaf, and some rows of the others."""
    mesh = Mesh(devices, ("data",))
    rows = NamedSharding(mesh, P("data"))
    return {"x": rows, "y": rows, "z": NamedSharding(mesh, P())}


def _columns(devices: Any) -> Any:
    """Every process needs all rows, and of one leaf only some columns."""
    mesh = Mesh(devices.reshape(-1, 2), ("sequence", "model"))
    everywhere = NamedSharding(mesh, P())
    return {"x": NamedSharding(mesh, P(None, "sequence")), "y": everywhere, "z": everywhere}


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "data": _data,
    "permuted": _permuted,
    "model": _model,
    "model_across": _model_across,
    "flattened": _flattened,
    "sequence": _sequence,
    "skewed": _skewed,
    "one_leaf_everywhere": _one_leaf_everywhere,
    "columns": _columns,
}


def sharding_of(layout: str, devices: Sequence[jax.Device]) -> Any:
    """The sharding, or the tree of them, of a batch."""
    return LAYOUTS[layout](np.array(devices))
