"""The digests of a row's parts add up to the row's digest, and every change of a row changes its digest."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.tools.audit.digest import row_digests, shard_digests, whole_row_digests

DTYPES = [np.uint8, np.bool_, np.int16, ml_dtypes.bfloat16, np.float32, np.int64, np.float64, np.complex128]
SHAPE = (4, 6)


def rows_of(dtype, count=5):
    random = np.random.default_rng(0)
    return random.integers(2 if dtype is np.bool_ else 100, size=(count, *SHAPE)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(down=st.integers(0, 4), across=st.integers(0, 6))
def test_digests_of_any_four_parts_add_up(dtype, down, across):
    rows = rows_of(dtype)
    parts = [
        row_digests(rows[:, a:b, c:d], 0, SHAPE, ((a, b), (c, d)))
        for a, b in ((0, down), (down, 4))
        for c, d in ((0, across), (across, 6))
    ]
    np.testing.assert_array_equal(np.sum(parts, axis=0, dtype=np.uint64), whole_row_digests(rows, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_a_row_changes_its_digest(dtype):
    rows = rows_of(dtype, count=1)
    flat = rows.reshape(-1)
    changed = [np.roll(rows, 1), np.zeros_like(rows), np.zeros_like(rows)[:, :3]]  # the last has another shape
    for i, bit in [(0, 0), (7, 0), (23, rows.dtype.itemsize * 8 - 1)]:
        one = flat.copy()
        one.view(np.uint8).reshape(24, -1)[i, bit // 8] ^= 1 << bit % 8
        changed.append(one.reshape(rows.shape))
    others = np.flatnonzero(flat != flat[0])
    for i in others[:3]:  # two values of a row exchanged
        swapped = flat.copy()
        swapped[[0, i]] = swapped[[i, 0]]
        changed.append(swapped.reshape(rows.shape))
    if dtype is np.float64:  # two signs flipped
        changed.append((rows + 1) * np.where(np.arange(24).reshape(SHAPE) < 2, -1, 1))
    found = [int(whole_row_digests(row, 0)[0]) for row in [rows, *changed]]
    assert len(set(found)) == len(found)
    assert int(whole_row_digests(rows, 1)[0]) not in found  # the same values in another leaf


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [(P(), 8), (P("data"), 2), (P(("data", "model")), 1), (P("data", "model"), 1), (P(None, "model"), 4)],
    ids=str,
)
def test_the_shards_of_each_replica_add_up_to_the_rows(spec, replicas):
    values = np.arange(48, dtype=np.int32).reshape(8, 6)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    found = shard_digests(jax.device_put(values, NamedSharding(mesh, spec)), 0)
    assert found.shape == (replicas, 8)
    for digests in found:
        np.testing.assert_array_equal(digests, whole_row_digests(values, 0))
