"""Tables in Parquet and Arrow files, on a local disk and in a store, against what they were written from."""

import datetime
import io
import itertools
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from rows_read import read_rows

import feedline
from feedline._src.rows.source import EncodedSource
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
        source.read_cuts(rows, [(sorted(ROWS).index(leaf), columns, out)])
        np.testing.assert_array_equal(out, ROWS[leaf][rows][:, columns[0]])


@pytest.mark.parametrize(("name", "is_mapped"), [("x.arrow", True), ("x.parquet", False), ("x.feather", False)])
def test_uncompressed_arrow_is_mapped_and_decoded_files_are_not(tmp_path, name, is_mapped):
    """A disk that fails under a mapped file ends the process, so files that are decoded anyway are not mapped."""
    path = written(tmp_path / name, **NUMBERS)
    source = feedline.open_source(path)
    assert source[COUNT - 1]["label"] == ROWS["label"][-1]
    assert (str(path) in Path("/proc/self/maps").read_text()) == is_mapped


def test_a_compressed_stream_may_have_categories_beside_its_chosen_columns(tmp_path, is_source_of):
    codes = pa.array(["a", "b"] * (COUNT // 2)).dictionary_encode()
    path = written(tmp_path / "compressed_stream.arrow", codes=codes, label=ROWS["label"])
    is_source_of(feedline.open_source(path, columns=["label"]), {"label": ROWS["label"]})


def test_columns_whose_names_begin_alike_are_distinguished(tmp_path):
    lists = pa.array([[1, 2], None], pa.list_(pa.int8(), 2))
    path = written(tmp_path / "x.parquet", **{"x.y": lists, "x": [3, 4]})
    assert feedline.open_source(path, columns=["x"])[1]["x"] == 4
    numbers = pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))
    path = written(tmp_path / "x.parquet", x=numbers, **{"x.y": pa.array([1, None]), "x.y.z": lists})
    source = feedline.open_source(path, columns=["x"])
    source.check_rows()
    assert source[1]["x"].tolist() == [3, 4]
    for name in ("x.y", "x.y.z"):
        with pytest.raises(feedline.RowError, match=f"'{re.escape(name)}' has 1 null;"):
            feedline.open_source(path, columns=[name]).check_rows()


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


_DAYS = [datetime.datetime(2020, 1, day) for day in (1, 2)]
_CODES = pa.array(["b", "a"]).dictionary_encode()
OTHER_ROWS = {  # {type: (values, words of the error, the remedy that they name, the numbers that it gives)}
    "dictionary": (_CODES, "take its codes", lambda c: c.combine_chunks().indices, [0, 1]),
    "date32": ([datetime.date(2020, 1, 1)] * 2, "pyarrow.int32", lambda c: c.cast(pa.int32()), [18262] * 2),
    "timestamp": (_DAYS, "seconds_between", lambda c: pc.seconds_between(pc.min(c), c), [0, 86400]),
    "time64": (
        [datetime.time(0, 0, 1), datetime.time(0, 1)],
        "seconds_between", lambda c: pc.seconds_between(pc.min(c), c), [0, 59],
    ),
    "duration": (pa.array([1_500, 6], pa.duration("ms")), "int64", lambda c: c.cast(pa.int64()), [1500, 6]),
    "decimal": (pa.array([1, 2], pa.decimal128(9)), "float64", lambda c: c.cast(pa.float64()), [1.0, 2.0]),
    "list": ([[1], [2]], "pyarrow.list_", lambda c: c.cast(pa.list_(pa.int64(), 1)), [[1], [2]]),
    "struct": ([{"y": 1}, {"y": 2}], "table.flatten", lambda c: c.flatten()[0], [1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_columns_of_other_rows_are_refused_with_a_remedy(tmp_path, kind):
    values, words, remedy, expected = OTHER_ROWS[kind]
    table = pa.table({"odd": values, "fine": [1, 2]})
    pq.write_table(table, tmp_path / "x.parquet")
    rule = r"numbers of one shape, bytes or text, and 1 of the 2 columns of .*x\.parquet do not"
    with pytest.raises(TypeError, match=rf"{rule}. 'odd' is {kind}.*{words}.*Convert them, .*columns=\['fine'\]"):
        feedline.open_source(tmp_path / "x.parquet")
    feather.write_feather(table.set_column(0, "odd", remedy(table["odd"])), str(tmp_path / "y.arrow"))
    source = feedline.open_source(tmp_path / "y.arrow", columns=["odd"])
    assert [source[row]["odd"].tolist() for row in range(2)] == expected


def test_all_columns_that_cannot_be_read_are_listed(tmp_path):
    odd = {"when": _DAYS, "label": _CODES, "price": pa.array([1, 2], pa.decimal128(9))}
    kinds = "'when' is timestamp.*'label' is dict.*'price' is decimal"
    found = rf"3 of the 5 columns of .*{kinds}.*columns=\['fine', 'text'\]"
    with pytest.raises(TypeError, match=found):
        feedline.open_source(written(tmp_path / "x.feather", **odd, fine=[1, 2], text=["a", "b"]))
    path = written(tmp_path / "x.parquet", **{f"c{i}": _DAYS for i in range(30)})
    with pytest.raises(TypeError, match=r"30 of the 30 .*'c19' is [^']*; … 10 more. Convert them, .* shows$"):
        feedline.open_source(path)
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), path)
    with pytest.raises(ValueError, match="has 'x' twice"):
        feedline.open_source(path)


@pytest.mark.parametrize("second", [{"x": [1.0]}, {"x": ["text"]}, {"x": [1], "y": [1]}])
def test_files_that_do_not_fit_together_are_refused(tmp_path, second):
    for first in ({"x": [1]}, {"x": [b"bytes"], "z": [1]}):
        pq.write_table(pa.table(first), tmp_path / "a.parquet")
        pq.write_table(pa.table(second), tmp_path / "b.parquet")
        with pytest.raises(ValueError, match=r"must agree in columns.*b\.parquet has .*choose columns"):
            feedline.open_source(tmp_path / "?.parquet")


def test_damage_within_a_row_group_is_an_error_of_its_rows(tmp_path):
    table = pa.table({"x": np.random.default_rng(0).random(4000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000, compression="zstd", use_dictionary=False)
    damaged = bytearray((tmp_path / "x.parquet").read_bytes())
    start = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(2).column(0).data_page_offset
    damaged[start : start + 2000] = bytes(2000)
    (tmp_path / "x.parquet").write_bytes(damaged)
    source = feedline.open_source(tmp_path / "x.parquet")
    read_rows(source, [0, 3999])
    with pytest.raises(feedline.RowError, match="rows that are stored together could not be read") as error:
        read_rows(source, [2500])
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
    assert sum(stop - start for start, stop in store.gets()) < 300_000  # only the footer
    store.requests.clear()
    assert source.will_read(np.array([0, 100_000]), 0)
    assert read_rows(source, [0, 100_000])["y"].tolist() == [0, 100_000]
    assert 1 <= len([part for part in store.gets() if part[1] - part[0] > 1 << 20]) <= 3


@pytest.mark.parametrize("name", ["stream.arrow", "compressed_stream.arrow"])
def test_a_stream_is_fetched_once(store, options, tmp_path, name):
    store.objects["/x.arrow"] = written(tmp_path / name, **mixed(*KINDS["32 bits"])).read_bytes()
    _ = feedline.open_source(f"{store.url}/x.arrow", store=options).identity
    store.requests.clear()
    assert feedline.open_source(f"{store.url}/x.arrow", store=options)[299]["text"] == TEXT[299].encode()
    assert not store.gets()


# --- nulls ---


NULL = [3, 63, 64, 65, 130, 299]


def _nulls(**more):
    """Rows 0 … 299 whose `label` is null at NULL. `fine` and `pair` have no nulls."""
    label = pa.array([None if i in NULL else i for i in range(COUNT)], pa.int32())
    return {"fine": np.arange(COUNT), "label": label, "pair": _list(np.arange(2 * COUNT).reshape(-1, 2)), **more}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_each_null_is_a_bad_row_by_itself(tmp_path, sharding, delivered, name, cache_bytes):
    path = written(tmp_path / name, **_nulls())
    source = feedline.open_source(path, cache_bytes=cache_bytes)
    good = np.setdiff1d(np.arange(COUNT), NULL)[::-1]
    np.testing.assert_array_equal(read_rows(source, good)["label"], good)
    asked = np.array([7, 130, 64, 3, 130])
    rule = r"'label' is null in this row; fill nulls .*columns=.*bad_rows='substitute'"
    with pytest.raises(feedline.RowError, match=rule) as error:
        read_rows(source, asked)
    assert (error.value.row in NULL, error.value.file) == (True, str(path))
    read_rows(feedline.open_source(path, columns=["fine"]), asked)
    reading = feedline.Reading(threads=1, bad_rows="mask", bad_rows_budget=0.5)
    order = feedline.Order(shuffle=False)
    feed = feedline.Feed(source, 16, sharding, order=order, epochs=1, reading=reading, remainder="pad")
    batches = delivered(feed)
    fine, valid = (np.concatenate([batch[name] for batch in batches])[:COUNT] for name in ("fine", "valid"))
    assert np.flatnonzero(~valid).tolist() == NULL
    np.testing.assert_array_equal(fine[valid], np.flatnonzero(valid))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_nulls_that_metadata_count_are_refused_when_a_feed_is_built(tmp_path, sharding, name):
    path = written(tmp_path / name, **_nulls(text=["x"] * COUNT))

    def decode(record, out, row):
        out["fine"][...] = record["fine"]

    decoded = feedline.decoded(path, decode, {"fine": jax.ShapeDtypeStruct((), np.int64)})
    fine = feedline.open_source(path, columns=["fine"])
    mixture = feedline.Mixture({"a": fine, "b": decoded}, weights={"a": 1, "b": 1})
    for source in (feedline.open_source(path, columns=["label", "fine"]), decoded, mixture):
        known = r"'label' has 6 nulls.*; fill nulls .*columns=.*bad_rows='substitute'"
        with pytest.raises(feedline.RowError, match=known) as error:
            feedline.Feed(source, 16, sharding)
        assert (error.value.row, error.value.file) == (None, str(path))
        reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=0.5)
        feedline.Feed(source, 16, sharding, reading=reading).close()
    feedline.Feed(fine, 16, sharding).close()


def test_known_nulls_of_several_files_are_counted_together(tmp_path, sharding):
    for i, values in enumerate(([*range(8)], [None, 3], [None, None])):
        pq.write_table(pa.table({"x": pa.array(values, pa.int32())}), tmp_path / f"{i}.parquet")
    with pytest.raises(feedline.RowError, match=r"'x' has 3 nulls in 2 of the 3 files; .*1\.parquet"):
        feedline.Feed(feedline.open_source(tmp_path / "*.parquet"), 8, sharding)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1.0, 2.0], [1.0, None], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        pa.array([[[1, 2]], [None], [[1, None]], [[5, 6]]], pa.list_(pa.list_(pa.int8(), 2), 1)),
        pa.array([b"abc", None, None, b"def"], pa.binary(3)),
        pa.array([True, None, None, False]),
    ],
    ids=["list", "nested", "bytes", "flag"],
)
def test_nulls_of_all_kinds(tmp_path, name, column):
    source = feedline.open_source(written(tmp_path / name, x=column))
    for row in (1, 2):
        with pytest.raises(feedline.RowError, match="is null in this row"):
            read_rows(source, [row])
    for row in (0, 3):
        expected = column[row].as_py()
        assert source[row]["x"].tolist() == (list(expected) if isinstance(expected, bytes) else expected)


def test_a_footer_that_contradicts_itself_is_refused_and_ends_no_process(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": pa.array([1, None, 3], pa.int32())}), path)
    data, said = path.read_bytes(), set()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in (i for i in range(begin, len(data) - 8) if data[i] == 2):  # INT32, as Thrift writes it
        path.write_bytes(data[:at] + b"\x0a" + data[at + 1 :])  # DOUBLE
        try:
            feedline.open_source(path).close()
        except (ValueError, TypeError) as error:
            said.add(str(error))
    assert any("a chunk of 'n' is DOUBLE, and not INT32" in each for each in said)
