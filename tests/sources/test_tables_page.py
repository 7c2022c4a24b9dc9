"""The Python of docs/tables.md makes leaves of a real table; they are compared with what pandas makes of it."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import feedline

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()


def test_its_leaves_are_those_of_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "<tables.md>", "exec"), names)
    rows, codes = capsys.readouterr().out.splitlines()
    assert rows.startswith(
        f"{336_776 // 8192 * 8192} {{'arr_delay': 'float32', 'arr_delay_missing': 'bool', 'carrier'"
    )
    assert codes == "[11, 16, 16]"

    table = pd.read_parquet("flights.parquet")
    source = feedline.open_source("leaves.arrow")
    leaves = {name: np.empty((len(source), *leaf.shape), leaf.dtype) for name, leaf in source.spec.items()}
    source.read(np.arange(len(source)), leaves)
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
    assert float(names["loss"]) < ((table["arr_delay"] / 60) ** 2).mean() * 1.2

    for columns in (None, ["origin"], ["time_hour"]):
        with pytest.raises(TypeError, match=r"' is .*as docs/tables.md shows"):
            feedline.open_source("flights.parquet", columns=columns)
    with pytest.raises(
        feedline.RowError, match=r"'arr_delay'.* is null in this row; fill nulls \(docs/tables.md\)"
    ):
        _ = feedline.open_source("flights.parquet", columns=["arr_delay"])[838]
    with pytest.raises(TypeError, match=r"are bytes; say how .*docs/tables.md"):
        feedline.Feed(feedline.open_source("flights.parquet", columns=["carrier"]), 1, names["one_device"])
