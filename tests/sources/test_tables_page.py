"""The leaves that the section on tables of docs/formats.md makes of a real table are those that pandas makes."""

import re
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from rows_read import read_rows

import feedline

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
SECTION = PAGE.partition("\n## Tables: ")[2].partition("\n## Hugging Face datasets")[0]


def test_its_leaves_are_those_of_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE):
        exec(compile(block, "<formats.md>", "exec"), names)

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

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for columns in (None, ["origin"], ["time_hour"]):
        with pytest.raises(TypeError, match=r"' is .*as docs/formats.md shows"):
            feedline.open_source("flights.parquet", columns=columns)
    with pytest.raises(
        feedline.RowError, match=r"'arr_delay'.* is null in this row; fill nulls \(docs/formats.md\)"
    ):
        _ = feedline.open_source("flights.parquet", columns=["arr_delay"])[838]
    with pytest.raises(TypeError, match=r"are bytes; say how .*docs/formats.md"):
        feedline.Feed(feedline.open_source("flights.parquet", columns=["carrier"]), 1, sharding)
