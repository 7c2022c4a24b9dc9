"""The leaves that the section on tables of docs/formats.md makes of a real table are those that pandas makes."""

import jax
import numpy as np
import pandas as pd
import pytest
from rows_read import read_rows
from test_docs import run

import feedline

pytestmark = pytest.mark.slow


def test_its_leaves_are_those_of_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("docs/formats.md", "\n## Tables: ", "\n## Hugging Face datasets")
    table = pd.read_parquet("flights.parquet")
    source = feedline.open_source("leaves.arrow")
    leaves = read_rows(source)
    for name in ("carrier", "origin", "dest", "tailnum"):
        expected, words = pd.factorize(table[name].astype(object), sort=True)
        np.testing.assert_array_equal(leaves[name], np.where(expected < 0, len(words), expected))
    for name in ("distance", "arr_delay"):
        np.testing.assert_array_equal(leaves[name], table[name].fillna(0))
        np.testing.assert_array_equal(leaves[f"{name}_missing"], table[name].isna())
    assert leaves["arr_delay_missing"].sum() == 9_430
    hours = (table["time_hour"] - pd.Timestamp(0, tz="UTC")) // pd.Timedelta("1h")
    np.testing.assert_array_equal(leaves["hours"], hours)
    np.testing.assert_array_equal(leaves["weekday"], (hours // 24 + 3) % 7)  # 1970 began with a Thursday

    for columns in (None, ["origin"], ["time_hour"]):
        with pytest.raises(TypeError, match=r"' is .*as docs/formats.md shows"):
            feedline.open_source("flights.parquet", columns=columns)
    with pytest.raises(
        feedline.RowError, match=r"'arr_delay'.* is null in this row; fill nulls \(docs/formats.md\)"
    ):
        _ = feedline.open_source("flights.parquet", columns=["arr_delay"])[838]
    with pytest.raises(TypeError, match=r"are bytes; say how .*docs/formats.md"):
        feedline.Feed(feedline.open_source("flights.parquet", columns=["carrier"]), 1, jax.devices()[0])
