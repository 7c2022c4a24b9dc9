"""JSON lines become arrays or dicts of what `json` reads; other lines and files are refused."""

import functools
import json
import os
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_read import read_rows

import feedline
from feedline._src.formats import jsonl
from feedline._src.rows import digests


def written(path, lines):
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(text.encode())
    return path


def test_numbers_are_leaves(tmp_path):
    path = written(tmp_path / "x.jsonl", [{"i": 1, "f": 1, "b": True, "m": [[1, 2], [3, 4]]}] * 2 + [
        {"i": -(2**63), "f": 0.5, "b": False, "m": [[5, 6], [7, 8]], "more": {}}
    ])  # fmt: skip
    source = feedline.open_source(path)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in source.spec.items()} == {
        "i": ((), "int64"), "f": ((), "float64"), "b": ((), "bool"), "m": ((2, 2), "int64")
    }  # fmt: skip
    found = read_rows(source)
    assert (found["i"].tolist(), found["f"].tolist()) == ([1, 1, -(2**63)], [1, 1, 0.5])
    assert (found["b"].tolist(), found["m"][2].tolist()) == ([True, True, False], [[5, 6], [7, 8]])


def test_text_is_bytes_beside_numbers(tmp_path):
    path = written(
        tmp_path / "x.jsonl", [{"text": "grüße \\u20ac", "n": 3, "v": [0.5, 1]}, {"text": "", "n": 4, "v": [1, 2]}]
    )
    source = feedline.open_source(path)
    assert "text bytes, n int64[], v float64[2]" in repr(source)
    first, second = read_rows(source)
    assert (first["text"], first["n"], second["text"]) == ("grüße \\u20ac".encode(), 3, b"")
    assert isinstance(first["n"], np.int64)
    np.testing.assert_array_equal(second["v"], np.array([1.0, 2.0]))
    alone = feedline.open_source(path, columns=["text"])
    assert (alone.fields, alone[0]) == (None, first["text"])
    with pytest.raises(TypeError, match=r"how they are decoded: .* columns=\[\.\.\.\]\)$"):
        feedline.Feed(source, 1, jax.devices()[0])
    assert alone.identity != source.identity


VALUES = st.fixed_dictionaries({
    "text": st.text(),
    "i": st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(allow_nan=False),
})  # fmt: skip


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=20), st.sampled_from(["\n", "\r\n", " \n\n\t\r\n"]), st.booleans())
def test_any_lines_however_they_end(tmp_path_factory, values, end, ascii):
    """Also with a byte order mark, with blank lines, and without a line break at the end."""
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    text = "\n" + end.join(json.dumps(value, ensure_ascii=ascii) for value in values)
    path.write_bytes(text.encode("utf-8-sig" if ascii else "utf-8"))
    source = feedline.open_source(path)
    assert [{**record, "text": record["text"].decode()} for record in read_rows(source)] == values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"x": 1}', "must have the fields of the first, but .* has no 'y'"),
        ('{"x": null, "y": 1}', r"the field 'x' must be int64\[\], as in the first line, and is null"),
        ('{"x": "1", "y": 1}', r"the field 'x' must be int64\[\], .* and is \"1\""),
        ('{"x": 1.5, "y": 1}', r"the field 'x' must be int64\[\], .* and is 1.5"),
        ('{"x": 9223372036854775808, "y": 1}', r"the field 'x' must be int64\[\], .* 9223372036854775808"),
        ('{"x": [1], "y": 1}', "the field 'x' must be int64"),
        ('{"x": 100000000000000000000, "y": 1}', r"the field 'x' must be int64\[\], .* 100000000000000000000"),
        ('{"x": 1, "y": "z"}', "the field 'y' must be float64"),
        ('{"x": 1, "y": 1' + "0" * 400 + "}", "the field 'y' must be float64"),
        ("[1, 2]", r"each line must be a JSON object, and .*\[1, 2\].* not: it is a JSON list; correct the line"),
        ("\xff", "codec can't decode"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion|must be int64"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("text", [False, True])
def test_a_line_that_does_not_fit_is_a_bad_row(tmp_path, line, message, text, monkeypatch):
    monkeypatch.setattr(jsonl, "_START_BYTES", 100)
    good = '{"x": 1, "y": 0.5, "text": "t"}'
    line = line.replace('"x"', '"text": "t", "x"') if text else line
    data = "\n".join([good] * 300 + [line] + [good] * 9).encode("latin-1")
    (tmp_path / "x.jsonl").write_bytes(data)
    source = feedline.open_source(tmp_path / "x.jsonl", columns=["x", "y", "text"] if text else ["x", "y"])
    with pytest.raises(feedline.RowError, match=message) as caught:
        read_rows(source)
    assert (caught.value.row, caught.value.file) == (300, str(tmp_path / "x.jsonl"))
    assert source[299]["x"] == source[301]["x"] == 1


def test_values_fit_whatever_the_others_are(tmp_path):
    """A field of float64 takes NaN, infinity, and integers beyond int64 and uint64."""
    lines = ['{"x": 0.5}', '{"x": NaN}', '{"x": -Infinity}', '{"x": 9223372036854775808}', f'{{"x": {10**20}}}']
    source = feedline.open_source(written(tmp_path / "x.jsonl", lines))
    together = read_rows(source)["x"]
    np.testing.assert_array_equal(together, [0.5, np.nan, -np.inf, 2.0**63, 1e20])
    np.testing.assert_array_equal([source[i]["x"] for i in range(5)], together)


@pytest.mark.parametrize("value", [[1, 2**63 + 1], [-1, 2**63 + 1], [[1], [2**64]]])
def test_lists_of_integers_beyond_int64_do_not_become_floats(tmp_path, value):
    first = written(tmp_path / "first.jsonl", [{"x": value, "y": 1}])
    with pytest.raises(TypeError, match=r"numbers that fit int64 .*'x' is \[.*columns=\['y'\]"):
        feedline.open_source(first)
    small = jax.tree.map(lambda _: 1, value)
    later = feedline.open_source(written(tmp_path / "later.jsonl", [{"x": small}, {"x": value}]))
    assert (later.spec["x"].dtype, later[0]["x"].tolist()) == (np.int64, small)
    with pytest.raises(feedline.RowError, match=r"must be int64\[.*, as in the first line, and is \["):
        later[1]


def test_lists_may_have_all_axes_that_numpy_has(tmp_path):
    value = functools.reduce(lambda inner, _: [inner], range(50), 1)
    source = feedline.open_source(written(tmp_path / "x.jsonl", [{"x": value}]))
    assert source[0]["x"].ndim == 50


def test_columns_that_cannot_be_read_are_listed(tmp_path):
    line = {"n": 1, "o": {"a": 1}, "tags": ["a"], "none": None, "big": 2**64, "empty": [], "ragged": [[1], [1, 2]]}
    path = written(tmp_path / "x.jsonl", [line, {"n": 2}])
    with pytest.raises(TypeError) as caught:
        feedline.open_source(path)
    listed = r"""6 of 7 of .*'o' is \{"a": 1\}; 'tags' is \["a"\]; 'none' is null; 'big' is 184.*columns=\['n'\]"""
    assert re.search(listed, str(caught.value))
    assert read_rows(feedline.open_source(path, columns=["n"]))["n"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n \r\n\t\n", "at least one row, got .* with no lines"),
        (b"a,b\n1,2\n", r"x\.jsonl cannot be read as JSON lines: each line .*, and b'a,b' is not"),
        (b'[\n{"x": 1}\n]\n', r"write it again, one object a line: pandas\.read_json\(path\)"),
        (b'"x"', "it is a JSON str"),
        (b"{}", "is not: it has no fields"),
    ],
)
def test_what_is_no_file_of_json_lines(tmp_path, data, message):
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        feedline.open_source(tmp_path / "x.jsonl")


def test_the_first_file_with_lines_says_what_fields_there_are(tmp_path):
    written(tmp_path / "a.jsonl", [])
    written(tmp_path / "b.jsonl", [{"x": 1}, {"x": 2}])
    written(tmp_path / "c.jsonl", [{"x": 3.5, "y": 1}, {"y": 1, "x": 4}])
    source = feedline.open_source(tmp_path / "*.jsonl")
    assert [source[row]["x"] for row in (0, 1, 3)] == [1, 2, 4]
    with pytest.raises(feedline.RowError, match=r"must be int64.* 3\.5") as caught:
        source[2]
    assert caught.value.file == str(tmp_path / "c.jsonl")


def test_lines_that_moved_are_no_bad_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "of_samples", lambda size, samples: [size, "samples that miss the change"])
    path = written(tmp_path / "x.jsonl", [{"x": "a"}, {"x": "bbbb"}, {"x": "c"}, {"x": "d"}])
    time = path.stat().st_mtime_ns
    feedline.open_source(path)
    written(path, [{"x": "a"}, {"x": "b"}, {"x": "cccc"}, {"x": "d"}])
    os.utime(path, ns=(time, time))
    source = feedline.open_source(path)
    assert (source[0], source[3]) == (b"a", b"d")
    with pytest.raises(feedline.FeedError, match="rewritten with the same size") as caught:
        source[2]
    assert not isinstance(caught.value, feedline.RowError)
