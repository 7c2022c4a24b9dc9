"""Columns of bytes and of text in Parquet and Arrow files, and ArrayRecord files as bytes."""

import itertools
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import feedline
from feedline._src.rows.encoded_source import EncodedSource

COUNT = 50
BYTES = [bytes([i]) * (i % 7) for i in range(COUNT)]
TEXT = [f"ä{i}" * (i % 3) for i in range(COUNT)]


def columns(kind, text=pa.string()):  # noqa: B008
    return {
        "jpg": pa.array(BYTES, kind),
        "text": pa.array(TEXT, text),
        "label": pa.array(range(COUNT), pa.int16()),
        "flag": pa.array([i % 2 == 0 for i in range(COUNT)]),
        "box": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * COUNT)), 4),
    }


def stream(table, path):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=15)


WRITERS = {
    "x.parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=15),
    "x.arrow": lambda table, path: pa.feather.write_feather(table, path, "uncompressed", chunksize=15),
    "compressed.arrow": lambda table, path: pa.feather.write_feather(table, path, "zstd", chunksize=15),
    "stream.arrow": stream,
}
KINDS = {"32 bits": (pa.binary(), pa.string()), "64 bits": (pa.large_binary(), pa.large_string())}
VIEWS = (pa.binary_view(), pa.string_view())


@pytest.mark.parametrize(
    ("name", "kinds"), [*itertools.product(WRITERS, KINDS.values()), ("x.parquet", VIEWS)], ids=str
)
def test_rows_are_dicts_of_bytes_and_numbers(tmp_path, name, kinds):
    WRITERS[name](pa.table(columns(*kinds)), str(tmp_path / name))
    source = pickle.loads(pickle.dumps(feedline.open_source(tmp_path / name)))
    assert isinstance(source, EncodedSource)
    assert (len(source), source.fields) == (COUNT, ("jpg", "text", "label", "flag", "box"))
    rows = np.random.default_rng(0).integers(0, COUNT, 200)
    for row, record in zip(rows.tolist(), source.records(rows), strict=True):
        assert list(record) == list(source.fields)
        assert (record["jpg"], record["text"]) == (BYTES[row], TEXT[row].encode())
        assert (record["label"], record["label"].dtype) == (row, np.int16)
        assert record["flag"] == (row % 2 == 0)
        np.testing.assert_array_equal(record["box"], np.arange(4.0) + 4 * row)
    assert source.file_of(20) == str(tmp_path / name)
    expected = (
        f"<TableSource: rows {COUNT}, jpg bytes, text bytes, label int16[], flag bool[], box float64[4], from "
    )
    assert repr(source).startswith(expected)
    only = feedline.open_source(tmp_path / name, columns=["jpg"])
    assert (only.fields, only[-1], only.records(np.array([8, 1]))) == (None, BYTES[-1], [BYTES[8], BYTES[1]])
    assert feedline.open_source(tmp_path / name, columns=["label"]).spec["label"].dtype == np.int16
    only.close()
    assert only[1] == BYTES[1]


@pytest.mark.parametrize("name", ["x.arrow", "compressed.arrow", "stream.arrow"])
def test_views_in_arrow_are_refused(tmp_path, name):
    WRITERS[name](pa.table(columns(*VIEWS)), str(tmp_path / name))
    for column, remedy in (("jpg", "binary"), ("text", "string")):
        with pytest.raises(TypeError, match=rf"'{column}' is .*cast it: column.cast\(pyarrow.{remedy}\(\)\)"):
            feedline.open_source(tmp_path / name, columns=[column])


@pytest.mark.parametrize("name", WRITERS)
def test_a_null_is_a_bad_row(tmp_path, name):
    table = pa.table(columns(pa.binary()) | {"jpg": pa.array([None if i == 33 else b"x" for i in range(COUNT)])})
    WRITERS[name](table, str(tmp_path / name))
    source = feedline.open_source(tmp_path / name)
    assert len(source.records(np.array([32, 34, 0]))) == 3
    with pytest.raises(feedline.RowError, match=r"must have a value, and 'jpg' is null in this row") as caught:
        source.records(np.array([1, 40, 33, 2]))
    assert (caught.value.row, caught.value.file) == (33, str(tmp_path / name))


def test_several_files_and_what_does_not_fit(tmp_path):
    for i in range(3):
        pa.parquet.write_table(pa.table({"jpg": BYTES[10 * i : 10 * i + 10]}), tmp_path / f"{i}.parquet")
    source = feedline.open_source(tmp_path / "*.parquet", cache_bytes=0)
    assert source.records(np.arange(30)) == BYTES[:30]
    assert source.file_of(10) == str(tmp_path / "1.parquet")
    pa.parquet.write_table(pa.table({"jpg": ["text"], "label": [1]}), tmp_path / "3.parquet")
    with pytest.raises(ValueError, match=r"3.parquet has .*choose columns"):
        feedline.open_source(tmp_path / "*.parquet")
    pa.parquet.write_table(pa.table({"jpg": [1]}), tmp_path / "3.parquet")
    with pytest.raises(ValueError, match=r"3.parquet has .*int64.*choose columns"):
        feedline.open_source(tmp_path / "*.parquet")
    pa.parquet.write_table(pa.table({"jpg": ["a"], "list": [[1]]}), tmp_path / "4.parquet")
    with pytest.raises(TypeError, match=r"1 of the 2 of .*4.parquet has others. 'list' is list"):
        feedline.open_source(tmp_path / "4.parquet")
    with pytest.raises(TypeError, match=r"TableSource.* are bytes; .*or leave columns of bytes and text out"):
        feedline.Feed(tmp_path / "0.parquet", 1, None)
    pa.parquet.write_table(pa.table({"jpg": pa.array([], pa.binary())}), tmp_path / "5.parquet")
    with pytest.raises(ValueError, match=r"at least one row, got .*5.parquet with none"):
        feedline.open_source(tmp_path / "5.parquet")
