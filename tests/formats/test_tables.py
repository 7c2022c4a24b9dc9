"""Tables in Parquet and Arrow files, on a local disk and in a store, against what they were written from."""

import datetime
import io
import itertools
import pickle
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import feedline
from feedline._src.formats.arrow import column_of
from feedline._src.rows.encoded_source import EncodedSource
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.groups import GroupSource

COUNT = 300


def write_stream(table, path, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=64)


WRITERS = {
    "x.parquet": lambda table, path: pq.write_table(table, path, row_group_size=64),
    "x.arrow": lambda table, path: feather.write_feather(table, str(path), "uncompressed", chunksize=64),
    "x.feather": lambda table, path: feather.write_feather(table, str(path), "lz4", chunksize=64),
    "stream.arrow": write_stream,
    "compressed_stream.arrow": lambda table, path: write_stream(table, path, "zstd"),
}


def written(path, **columns):
    WRITERS[path.name](pa.table(columns), path)
    return path


def _list(values):
    for size in values.shape[:0:-1]:
        values = (pa.array(values.reshape(-1)) if isinstance(values, np.ndarray) else values, size)
        values = pa.FixedSizeListArray.from_arrays(*values)
    return values


RANDOM = np.random.default_rng(0)
ROWS = {
    "bytes": RANDOM.integers(0, 255, (COUNT, 5), np.uint8),
    "flag": RANDOM.integers(0, 2, COUNT).astype(bool),
    "half": RANDOM.random(COUNT).astype(np.float16),
    "label": RANDOM.integers(-9, 9, COUNT).astype(np.int64),
    "list": RANDOM.random((COUNT, 3), np.float32),
    "nested": RANDOM.integers(0, 9, (COUNT, 2, 3)).astype(np.int16),
    "tensor": RANDOM.random((COUNT, 2, 2)),
}
_TENSORS = pa.fixed_shape_tensor(pa.float64(), (2, 2))
NUMBERS = ROWS | {
    "bytes": pa.array([row.tobytes() for row in ROWS["bytes"]], pa.binary(5)),
    "list": _list(ROWS["list"]),
    "nested": _list(ROWS["nested"]),
    "tensor": pa.ExtensionArray.from_storage(_TENSORS, _list(ROWS["tensor"].reshape(COUNT, 4))),
}
BYTES = [bytes([i % 256]) * (i % 7) for i in range(COUNT)]
TEXT = [f"ä{i}" * (i % 3) for i in range(COUNT)]


# --- numbers ---


@pytest.mark.parametrize("name", WRITERS)
def test_columns_of_fixed_width(tmp_path, is_source_of, as_local, name):
    path = written(tmp_path / name, **NUMBERS)
    source = feedline.open_source(path)
    assert isinstance(source, ArraySource if name in ("x.arrow", "stream.arrow") else GroupSource)
    is_source_of(source, ROWS)
    as_local(f"in_a_{name}", path.read_bytes())
    some = feedline.open_source(path, columns=["list", "label"])
    is_source_of(some, {name: ROWS[name] for name in ("label", "list")})
    for columns, leaf in (((slice(1, 3),), "list"), ((np.array([0, 4]),), "bytes")):
        out, rows = np.empty((4, 2), ROWS[leaf].dtype), np.array([299, 3, 3, 100])
        source.read_leaf(sorted(ROWS).index(leaf), rows, columns, out)
        np.testing.assert_array_equal(out, ROWS[leaf][rows][:, columns[0]])


@pytest.mark.parametrize("leaf", ROWS)
def test_a_part_of_a_column_is_viewed_from_where_it_starts(leaf):
    column = pa.table(NUMBERS).column(leaf).combine_chunks().slice(7, 20)
    np.testing.assert_array_equal(column_of(column, leaf).values, ROWS[leaf][7:27])


def test_uncompressed_arrow_is_mapped_and_not_copied(tmp_path):
    path, before = written(tmp_path / "x.arrow", **NUMBERS), pa.total_allocated_bytes()
    feedline.open_source(path, columns=["bytes", "label", "list", "nested"])
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("name", ["x.parquet", "x.feather"])
def test_decoded_files_are_read_and_not_mapped(tmp_path, name):
    """A disk that fails under a mapped file ends the process."""
    source = feedline.open_source(written(tmp_path / name, **NUMBERS))
    assert source[COUNT - 1]["label"] == ROWS["label"][-1]
    assert str(tmp_path / name) not in Path("/proc/self/maps").read_text()


def test_a_compressed_stream_may_have_categories_beside_its_chosen_columns(tmp_path, is_source_of):
    codes = pa.array(["a", "b"] * (COUNT // 2)).dictionary_encode()
    path = written(tmp_path / "compressed_stream.arrow", codes=codes, label=ROWS["label"])
    is_source_of(feedline.open_source(path, columns=["label"]), {"label": ROWS["label"]})


def test_columns_whose_names_begin_alike_are_distinguished(tmp_path):
    path = written(tmp_path / "x.parquet", **{"x.y": [1, 2], "x": [3, 4]})
    assert feedline.open_source(path, columns=["x"])[1]["x"] == 4


# --- bytes and text ---


KINDS = {"32 bits": (pa.binary(), pa.string()), "64 bits": (pa.large_binary(), pa.large_string())}
VIEWS = (pa.binary_view(), pa.string_view())


def mixed(kind, text):
    columns = {"jpg": pa.array(BYTES, kind), "text": pa.array(TEXT, text)}
    return columns | {name: NUMBERS[name] for name in ("label", "flag", "list")}


@pytest.mark.parametrize(
    ("name", "kinds"), [*itertools.product(WRITERS, KINDS.values()), ("x.parquet", VIEWS)], ids=str
)
def test_rows_with_bytes_are_dicts(tmp_path, as_local, name, kinds):
    path = written(tmp_path / name, **mixed(*kinds))
    source = feedline.open_source(path)
    assert isinstance(source, EncodedSource)
    assert (len(source), source.fields) == (COUNT, ("jpg", "text", "label", "flag", "list"))
    rows = RANDOM.integers(0, COUNT, 200)
    for row, record in zip(rows.tolist(), source.records(rows), strict=True):
        assert list(record) == list(source.fields)
        assert (record["jpg"], record["text"]) == (BYTES[row], TEXT[row].encode())
        assert (record["label"], record["label"].dtype) == (ROWS["label"][row], np.int64)
        assert record["flag"] == ROWS["flag"][row]
        np.testing.assert_array_equal(record["list"], ROWS["list"][row])
    kinds = "jpg bytes, text bytes, label int64[], flag bool[], list float32[3]"
    assert repr(source) == f"<TableSource: rows {COUNT}, {kinds}, from {path}>"
    as_local(f"in_a_{name}", path.read_bytes())
    only = feedline.open_source(path, columns=["jpg"])
    assert (only.fields, only[-1], only.records(np.array([8, 1]))) == (None, BYTES[-1], [BYTES[8], BYTES[1]])
    assert feedline.open_source(path, columns=["label"]).spec["label"].dtype == np.int64


@pytest.mark.parametrize("name", ["x.arrow", "x.feather", "stream.arrow"])
def test_views_in_arrow_are_refused(tmp_path, name):
    path = written(tmp_path / name, **mixed(*VIEWS))
    for column, remedy in (("jpg", "binary"), ("text", "string")):
        with pytest.raises(TypeError, match=rf"'{column}' is .*cast it: column.cast\(pyarrow.{remedy}\(\)\)"):
            feedline.open_source(path, columns=[column])


# --- what is refused ---


_TIMES = [datetime.datetime(2020, 1, day) for day in (1, 2)]
_LABELS = pa.array(["b", "a"]).dictionary_encode()


@pytest.mark.parametrize(
    ("values", "found", "type_name", "remedy", "expected"),
    [
        (_LABELS, "dictionary", "take its codes", lambda c: c.combine_chunks().indices, [0, 1]),
        ([datetime.date(2020, 1, 1)] * 2, "date32", "pyarrow.int32", lambda c: c.cast(pa.int32()), [18262] * 2),
        (_TIMES, "timestamp", "seconds_between", lambda c: pc.seconds_between(pc.min(c), c), [0, 86400]),
        (
            pa.array([datetime.time(0, 0, 1), datetime.time(0, 1)]),
            "time64",
            "seconds_between",
            lambda c: pc.seconds_between(pc.min(c), c),
            [0, 59],
        ),
        (
            pa.array([1_500, 61_000], pa.duration("ms")),
            "duration",
            "pyarrow.int64",
            lambda c: c.cast(pa.int64()),
            [1500, 61_000],
        ),
        (pa.array([1, 2], pa.decimal128(9)), "decimal", "float64", lambda c: c.cast(pa.float64()), [1.0, 2.0]),
        ([[1], [2]], "list<", "pyarrow.list_", lambda c: c.cast(pa.list_(pa.int64(), 1)), [[1], [2]]),
        (
            [["a"]] * 2,
            "list<",
            "pyarrow.list_",
            lambda c: pa.array([[1], [2]], pa.list_(pa.int64(), 1)),
            [[1], [2]],
        ),
        ([{"y": 1}, {"y": 2}], "struct", "table.flatten", lambda c: c.flatten()[0], [1, 2]),
    ],
)
def test_columns_of_other_rows_are_refused_with_a_remedy(tmp_path, values, found, type_name, remedy, expected):
    table = pa.table({"odd": values, "fine": [1, 2]})
    pq.write_table(table, tmp_path / "x.parquet")
    rule = rf"rows of one size that are numbers, and 1 of the 2 of .*x\.parquet have others. 'odd' is {found}"
    with pytest.raises(TypeError, match=rf"{rule}.*{type_name}.*Convert them, .*columns=\['fine'\]"):
        feedline.open_source(tmp_path / "x.parquet")
    feather.write_feather(table.set_column(0, "odd", remedy(table["odd"])), str(tmp_path / "y.arrow"))
    source = feedline.open_source(tmp_path / "y.arrow", columns=["odd"])
    assert [source[row]["odd"].tolist() for row in range(2)] == expected


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
@pytest.mark.parametrize("text", [{}, {"text": ["a", "b"]}])
def test_all_columns_that_cannot_be_read_are_listed(tmp_path, name, text):
    odd = {"when": _TIMES, "label": _LABELS, "price": pa.array([1, 2], pa.decimal128(9))}
    with pytest.raises(TypeError) as caught:
        feedline.open_source(written(tmp_path / name, **odd, fine=[1, 2], **text))
    assert re.findall(r"'(\w+)' is (\w+)[^:]*: (\w+)", str(caught.value)) == [
        ("when", "timestamp", "count"),
        ("label", "dictionary", "take"),
        ("price", "decimal128", "cast"),
    ]
    assert f"3 of the {4 + len(text)} of" in str(caught.value)
    assert f"leave them out: columns={['fine', *text]}" in str(caught.value)


def test_a_table_of_many_such_columns_lists_some(tmp_path):
    path = written(tmp_path / "x.parquet", **{f"c{i}": _TIMES for i in range(30)})
    with pytest.raises(TypeError, match=r"30 of the 30 of .*'c19' is [^']*; … 10 more. Convert them, .* shows$"):
        feedline.open_source(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_what_is_no_table_of_rows_is_refused(tmp_path, kind):
    (tmp_path / f"folder.{kind}").mkdir()
    with pytest.raises(ValueError, match=rf"is a folder; pass a glob .*folder\.{kind}/\*\.{kind}"):
        feedline.open_source(tmp_path / f"folder.{kind}")
    for columns in ({"x": pa.array([], pa.int64())}, {"x": pa.array([], pa.string())}):
        with pytest.raises(ValueError, match=rf"at least one row, got .*x\.{kind}"):
            feedline.open_source(written(tmp_path / f"x.{kind}", **columns))


@pytest.mark.parametrize("second", [{"x": [1.0]}, {"x": ["text"]}, {"x": [1], "y": [1]}])
def test_files_that_do_not_fit_together_are_refused(tmp_path, second):
    for first in ({"x": [1]}, {"x": [b"bytes"], "z": [1]}):
        pq.write_table(pa.table(first), tmp_path / "a.parquet")
        pq.write_table(pa.table(second), tmp_path / "b.parquet")
        with pytest.raises(ValueError, match=r"must agree in columns.*b\.parquet has .*choose columns"):
            feedline.open_source(tmp_path / "?.parquet")


def test_bytes_are_no_source_of_a_feed(tmp_path):
    with pytest.raises(TypeError, match=r"TableSource.* are bytes; .*or leave columns of bytes and text out"):
        feedline.Feed(written(tmp_path / "x.parquet", jpg=BYTES), 1, None)


def test_names_that_occur_twice_are_refused(tmp_path):
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="has 'x' twice"):
        feedline.open_source(tmp_path / "x.parquet")


def test_damage_within_a_row_group_is_an_error_of_its_rows(tmp_path):
    table = pa.table({"x": np.random.default_rng(0).random(4000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000, compression="zstd", use_dictionary=False)
    damaged = bytearray((tmp_path / "x.parquet").read_bytes())
    start = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(2).column(0).data_page_offset
    damaged[start : start + 2000] = bytes(2000)
    (tmp_path / "x.parquet").write_bytes(damaged)
    source = feedline.open_source(tmp_path / "x.parquet")
    source.read(np.array([0, 3999]), {"x": np.empty(2)})
    with pytest.raises(feedline.RowError, match="rows that are stored together could not be read") as error:
        source.read(np.array([2500]), {"x": np.empty(1)})
    assert (error.value.row, error.value.file) == (2000, str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_stream_that_was_cut_between_two_batches_is_not_a_shorter_one(tmp_path, compression):
    write_stream(pa.table(NUMBERS), tmp_path / "x.arrow", compression)
    whole = (tmp_path / "x.arrow").read_bytes()
    for i, cut in enumerate((whole[:-8], whole[: len(whole) // 2], whole + b"more")):
        (tmp_path / f"{i}.arrow").write_bytes(cut)
        with pytest.raises(ValueError, match=rf"{i}\.arrow cannot be read as an Arrow file"):
            feedline.open_source(tmp_path / f"{i}.arrow")


def test_a_missing_library_is_an_error_with_the_line_that_installs_it(tmp_path, monkeypatch):
    for kind in ("parquet", "arrow"):
        (tmp_path / f"x.{kind}").touch()
        for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
            monkeypatch.setitem(sys.modules, module, None)  # so that importing it fails
        with pytest.raises(
            ImportError, match=rf"pyarrow reads this format .*; from the clone: pip install '\.\[{kind}\]'"
        ):
            feedline.open_source(tmp_path / f"x.{kind}")


# --- in a store ---


LARGE = np.random.default_rng(5).normal(size=(200_000, 8)).astype(np.float32)  # 6.4 MB


@pytest.fixture(scope="module")
def large():
    file = io.BytesIO()
    columns = {"y": np.arange(200_000), "x": _list(LARGE), "text": [f"row {i}" for i in range(200_000)]}
    pq.write_table(pa.table(columns), file, row_group_size=20_000, compression="zstd")
    return file.getvalue()


def test_groups_are_fetched_before_they_are_read(store, options, large):
    store.objects["/x.parquet"] = large
    source = feedline.open_source(f"{store.url}/x.parquet", store=options, columns=["x", "y"])
    assert sum(stop - start for start, stop in store.gets()) < 300_000  # the footer
    store.requests.clear()
    assert source.will_read(np.array([0, 100_000]), 0)
    out = {"x": np.empty((2, 8), np.float32), "y": np.empty(2, np.int64)}
    source.read(np.array([0, 100_000]), out)
    assert out["y"].tolist() == [0, 100_000]
    assert 1 <= len([part for part in store.gets() if part[1] - part[0] > 1 << 20]) <= 3


def test_footers_and_samples_of_several_files_are_fetched_together(bucket, options, large):
    together, asked = threading.Barrier(3), set()
    for i in range(3):
        bucket.objects[f"/corpus/{i}.parquet"] = large

    def fault(method, path, part):
        if part is not None and path not in asked:
            asked.add(path)
            together.wait(timeout=10)

    bucket.fault = fault
    source = feedline.open_source("s3://corpus/*.parquet", columns=["y"], store=options)
    assert (len(source), len([part for part in bucket.gets() if part])) == (600_000, 3)
    asked.clear()
    assert len(source.identity["files"]) == len(asked) == 3


@pytest.mark.parametrize("name", ["stream.arrow", "compressed_stream.arrow"])
def test_a_stream_is_fetched_once(store, options, tmp_path, name):
    store.objects["/x.arrow"] = written(tmp_path / name, **mixed(*KINDS["32 bits"])).read_bytes()
    _ = feedline.open_source(f"{store.url}/x.arrow", store=options).identity
    store.requests.clear()
    assert feedline.open_source(f"{store.url}/x.arrow", store=options)[299]["text"] == TEXT[299].encode()
    assert not store.gets()


@pytest.mark.parametrize("columns", [["y"], ["y", "text"]])
def test_changes_and_troubles_of_a_store_are_no_bad_rows(store, tmp_path, large, columns):
    store.objects["/x.parquet"] = large
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    source = feedline.open_source(f"{store.url}/x.parquet", store=options, columns=columns)
    sent = pickle.dumps(source)
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2") as caught:
        source[199_999]
    assert not isinstance(caught.value, feedline.RowError)
    store.fault = lambda *request: None
    assert source[199_999]["y"] == 199_999
    store.objects["/x.parquet"] += b"x"
    for ask in (lambda: source[100_000], lambda: pickle.loads(sent)):
        with pytest.raises(feedline.FeedError, match="must not change") as caught:
            ask()
        assert not isinstance(caught.value, feedline.RowError)
