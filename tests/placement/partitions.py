"""Shardings of the eight CPU devices, and assignments of these devices to imaginary processes."""

import contextlib
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

DEVICES = np.array(jax.devices())
AXES = ("a", "b", "c")
SHAPES_OF_MESHES = [(1,), (3,), (8,), (2, 4), (4, 2), (2, 3), (1, 8), (2, 2, 2), (2, 1, 4)]
ONE, BY_HALVES, BY_PAIRS, EACH = [0] * 8, [0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], list(range(8))
INTERLEAVED, UNEVEN = [0, 1] * 4, [1, 0, 0, 0, 0, 0, 1, 2]


class Layout(NamedTuple):
    """A sharding, and the shape of an array that it can divide."""

    sharding: Any
    shape: tuple[int, ...]


def mesh_of(shape, order=range(8)):
    """A mesh with the axes a, b and c, over the first devices in that order."""
    chosen = DEVICES[list(order)[: math.prod(shape)]]
    return Mesh(chosen.reshape(shape), AXES[: len(shape)])


@st.composite
def meshes(draw):
    return mesh_of(draw(st.sampled_from(SHAPES_OF_MESHES)), draw(st.permutations(range(8))))


@st.composite
def layouts(draw, mesh, rows=None):
    """Each axis of the mesh cuts at most one axis of the array, alone or together with other axes of the mesh."""
    ndim = draw(st.integers(1, 3))
    cuts = {name: draw(st.integers(-1, ndim - 1)) for name in mesh.axis_names}
    spec, shape = [], []
    for axis in range(ndim):
        names = draw(st.permutations([name for name, cut in cuts.items() if cut == axis]))
        spec.append(names[0] if len(names) == 1 else tuple(names) if names else None)
        shape.append(math.prod(mesh.shape[name] for name in names) * draw(st.integers(1, 3)))
    while spec and spec[-1] is None and draw(st.booleans()):
        spec.pop()
    if rows is not None:
        shape[0] = rows
    return Layout(NamedSharding(mesh, P(*spec)), tuple(shape))


any_layout = meshes().flatmap(layouts)
processes = st.sampled_from([ONE, BY_HALVES, BY_PAIRS, EACH, INTERLEAVED, UNEVEN]) | st.lists(
    st.integers(0, 3), min_size=8, max_size=8
)
"""The process of each device."""


def devices_of(sharding, dealt):
    """{process: its devices of the sharding}."""
    owners = {}
    for device in sorted(sharding.device_set, key=lambda device: device.id):
        owners.setdefault(dealt[device.id], []).append(device)
    return owners


def owned(layout, devices):
    """bool[shape]: the elements that lie on `devices`."""
    mask = np.zeros(layout.shape, bool)
    for device, index in layout.sharding.devices_indices_map(layout.shape).items():
        if device in devices:
            mask[index] = True
    return mask


def numbered(shape, dtype=np.int32):
    """An array whose elements all differ."""
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def cut(values, plan):
    """The part of `values` that a process supplies, according to its plan."""
    part = values[plan.rows]
    for axis, column in enumerate(plan.columns, start=1):
        part = part[(slice(None),) * axis + (column,)]
    return part


@contextlib.contextmanager
def only(devices):
    """A context in which shardings report only these devices as addressable."""
    mine = property(lambda sharding: sharding.device_set & set(devices))
    with (
        mock.patch.object(NamedSharding, "addressable_devices", mine),
        mock.patch.object(SingleDeviceSharding, "addressable_devices", mine),
    ):
        yield
