"""Conversion of users' values to arrays: what would lose a value is refused."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_array, write_record
from feedline._src.sources.as_source import as_source

pytestmark = pytest.mark.slow

BIG = (1 << 24) + 1


class Column:
    """A column of Polars, whose `null_count` is a method."""

    def __init__(self, values, nulls):
        self.values, self.nulls = np.array(values), nulls

    def null_count(self):
        return self.nulls

    def to_numpy(self):
        return self.values

    def __array__(self, dtype=None, copy=None):
        return self.values


MISSING = {
    "Int64": pd.Series([BIG, None], dtype="Int64"),
    "category of integers": pd.Series([BIG, 1]).astype("category").reindex([0, 2]),
    "columns": pd.DataFrame({"a": pd.Series([BIG, None], dtype="Int64"), "b": [0.5, np.nan]}),
    "Arrow": pa.array([BIG, None]),
    "Polars": Column([BIG, np.nan], nulls=1),
}
WHOLE = {
    "Int64": (pd.Series([1 << 40, 1], dtype="Int64"), np.int64),
    "boolean": (pd.Series([True, False], dtype="boolean"), np.bool_),
    "NaN of NumPy": (pd.Series([0.5, np.nan]), np.float64),
    "columns": (pd.DataFrame({"a": [1.0, np.nan], "b": [2.0, 3.0]}), np.float64),
    "category of integers": (pd.Series([7, 9]).astype("category"), np.int64),
    "Arrow": (pa.chunked_array([[1 << 40], [2]]), np.int64),
    "Polars": (Column([1, 2], nulls=0), np.int64),
}


@pytest.mark.parametrize("value", MISSING.values(), ids=MISSING.keys())
def test_a_missing_value_is_refused(value):
    with pytest.raises(
        ValueError, match=r"source\['x'\]: every row must have a value, and 1 of .* is missing; fill"
    ):
        as_source({"x": value})


@pytest.mark.parametrize(("value", "dtype"), WHOLE.values(), ids=WHOLE.keys())
def test_a_column_without_missing_values_keeps_its_dtype(value, dtype):
    array = as_array("x", value)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize(
    "value",
    [
        pd.Series(["1", "2"], dtype="string"),
        pd.Series(["a", "b"]).astype("category"),
        pd.Series([Decimal("0.1"), Decimal(2)]),
        pd.Series([1, None], dtype=object),
        pd.Series(pd.to_datetime(["2020-01-01"])),
        pd.Series(pd.to_timedelta([1], "s")),
        pa.array([Decimal("0.1")]),
    ],
    ids=["text", "categories", "decimals", "objects", "times", "durations", "decimals of Arrow"],
)
def test_a_column_of_anything_but_numbers_is_refused(value):
    with pytest.raises(TypeError, match="an accelerator holds numbers and booleans, got dtype"):
        as_source({"x": value})


@pytest.mark.parametrize("values", [[np.uint16(300)], [np.uint64(1 << 40)]])
def test_a_list_in_a_record_keeps_its_values_or_is_refused(values):
    spec, out = RowSpec.of({"x": np.array([3], np.uint8)}), np.zeros((1, 1), np.uint8)
    write_record({"x": [np.uint16(200)]}, spec, [out], 0)
    assert out == 200
    with pytest.raises(ValueError, match=r"batch\['x'\]: .* does not fit uint8, the first record's dtype"):
        write_record({"x": values}, spec, [out], 0)
