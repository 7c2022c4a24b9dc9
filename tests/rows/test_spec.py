"""Narrowing to JAX's dtypes: a value that the placed dtype cannot hold is refused, and no other."""

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from feedline import Feed, Order, Reading, RowError
from feedline._src.rows.spec import Leaf, cast_into

NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
GREATEST = float(np.finfo(np.float32).max)
HALF_WAY = GREATEST + 2.0**103
"""Half way between the largest float32 and its would-be successor: it is rounded to even, and so to infinity."""


def cast(values, placed):
    leaf = Leaf("batch['x']", values.shape[1:], values.dtype, np.dtype(placed))
    out = np.empty(values.shape, placed)
    cast_into(out, values, leaf, np.arange(100, 100 + len(values)))
    return out


@st.composite
def tables(draw):
    """Rows of a wide dtype, many of whose values lie at the limits of the narrow one."""
    wide = np.dtype(draw(st.sampled_from(sorted(NARROWED))))
    limits = [-(2**31) - 1, -(2**31), 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62]
    if wide.kind == "f":
        near = [GREATEST, HALF_WAY, float(np.nextafter(HALF_WAY, 0)), 1e300, 1e-300, np.inf, np.nan]
        elements = st.sampled_from(near + [-x for x in near]) | st.floats(width=32)
    elif wide.kind == "c":
        elements = st.builds(complex, *[st.sampled_from([0.0, GREATEST, HALF_WAY, -1e300, np.nan, np.inf])] * 2)
    else:
        least, greatest = int(np.iinfo(wide).min), int(np.iinfo(wide).max)
        elements = st.sampled_from([x for x in limits if least <= x <= greatest]) | st.integers(0, 9)
    shape = draw(st.tuples(st.integers(0, 5), st.integers(0, 3)))
    return draw(arrays.arrays(wide, shape, elements=elements, fill=st.nothing()))


@given(tables())
def test_the_first_row_with_a_value_that_does_not_fit_is_named(values):
    with np.errstate(over="ignore"):
        narrow = values.astype(NARROWED[values.dtype.name])
    parts = (
        [(values.real, narrow.real), (values.imag, narrow.imag)]
        if values.dtype.kind == "c"
        else [(values, narrow)]
    )
    lost = np.zeros(values.shape, bool)
    for wide, cut in parts:
        lost |= np.isfinite(wide) & ~np.isfinite(cut) if wide.dtype.kind == "f" else wide != cut
    bad = np.flatnonzero(lost.any(axis=1))
    if not len(bad):
        np.testing.assert_array_equal(cast(values, narrow.dtype), narrow)
        return
    with pytest.raises(RowError, match=r"^batch\['x'\]: JAX holds .* does not fit.*jax_enable_x64") as error:
        cast(values, narrow.dtype)
    assert error.value.row - 100 == bad[0]


ROWS = np.arange(16.0)
ROWS[5] = 1e300


def doubled(batch, rows):
    return {"x": batch["x"] * np.float64(1e300) if 5 in rows.index else batch["x"] * np.float64(1)}


@pytest.mark.parametrize(
    ("source", "transform"),
    [
        ({"x": ROWS}, None),
        (grain.MapDataset.range(16).map(lambda i: {"x": ROWS[i]}), None),
        (grain.MapDataset.range(16).map(lambda i: {"x": ROWS[i]}).to_iter_dataset(), None),
        ({"x": np.arange(16.0, dtype=np.float32)}, doubled),
    ],
    ids=["columns", "records", "stream", "transform"],
)
def test_a_float_that_would_become_infinite_is_a_bad_row(source, transform, sharding):
    order = None if isinstance(source, grain.IterDataset) else Order(shuffle=False)
    how = {"order": order, "epochs": 1, "transform": transform}
    with Feed(source, 8, sharding, **how) as feed, pytest.raises(RowError, match=r"e\+30\d does not fit") as error:
        next(feed)
    assert error.value.row == 5
    reading = Reading(bad_rows="mask", bad_rows_budget=1)
    with Feed(source, 8, sharding, reading=reading, **how) as feed:
        batches = list(feed)
        assert feed.statistics().bad_rows == 1
    valid = np.concatenate([np.asarray(batch["valid"]) for batch in batches])
    assert np.flatnonzero(~valid).tolist() == [5]
    assert np.isfinite(np.concatenate([np.asarray(batch["x"]) for batch in batches])).all()
