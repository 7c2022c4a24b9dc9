"""Parquet and Arrow files against the arrays that they were written from."""

import datetime
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import feedline
from feedline._src.formats.arrow_columns import rows_of
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.groups import GroupSource

KINDS = {
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=64),
    "arrow": lambda table, path: feather.write_feather(table, str(path), compression="uncompressed", chunksize=64),
    "feather": lambda table, path: feather.write_feather(table, str(path), compression="lz4", chunksize=64),
}


def _rows(count, seed=0):
    random = np.random.default_rng(seed)
    return {
        "bytes": random.integers(0, 255, (count, 5), np.uint8),
        "flag": random.integers(0, 2, count).astype(bool),
        "half": random.random(count).astype(np.float16),
        "label": random.integers(-9, 9, count).astype(np.int64),
        "list": random.random((count, 3), np.float32),
        "nested": random.integers(0, 9, (count, 2, 3)).astype(np.int16),
        "tensor": random.random((count, 2, 2)),
    }


def _list(values):
    for size in values.shape[:0:-1]:
        values = (pa.array(values.reshape(-1)) if isinstance(values, np.ndarray) else values, size)
        values = pa.FixedSizeListArray.from_arrays(*values)
    return values


def _table(rows):
    tensor = rows["tensor"]
    storage = pa.FixedSizeListArray.from_arrays(pa.array(tensor.reshape(-1)), 4)
    return pa.table(
        {
            "bytes": pa.array([row.tobytes() for row in rows["bytes"]], pa.binary(5)),
            "flag": rows["flag"],
            "half": rows["half"],
            "label": rows["label"],
            "list": _list(rows["list"]),
            "nested": _list(rows["nested"]),
            "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float64(), (2, 2)), storage),
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_fixed_width_in_shards(tmp_path, is_source_of, kind):
    whole = _rows(300)
    table = _table(whole)
    for i, (start, stop) in enumerate(((0, 130), (130, 130), (130, 300))):
        KINDS[kind](table.slice(start, stop - start), tmp_path / f"{i}.{kind}")
    is_source_of(feedline.open_source(tmp_path / f"*.{kind}"), whole)
    some = feedline.open_source(tmp_path / f"*.{kind}", columns=["list", "label"])
    is_source_of(some, {name: whole[name] for name in ("label", "list")})


def test_uncompressed_arrow_is_mapped_and_not_copied(tmp_path):
    KINDS["arrow"](_table(_rows(300)), tmp_path / "x.arrow")
    source = feedline.open_source(tmp_path / "x.arrow")
    assert isinstance(source, ArraySource)
    before = pa.total_allocated_bytes()
    feedline.open_source(tmp_path / "x.arrow", columns=["bytes", "label", "list", "nested"])
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_leaf_are_cut(tmp_path, kind):
    whole = _rows(300)
    KINDS[kind](_table(whole), tmp_path / f"x.{kind}")
    source, rows = feedline.open_source(tmp_path / f"x.{kind}"), np.array([299, 3, 3, 100])
    names = sorted(whole)
    for columns, name in (((slice(1, 3),), "list"), ((np.array([0, 4]),), "bytes")):
        out = np.empty((4, 2), whole[name].dtype)
        source.read_leaf(names.index(name), rows, columns, out)
        np.testing.assert_array_equal(out, whole[name][rows][:, columns[0]])


_TIMES = [datetime.datetime(2020, 1, day) for day in (1, 2)]
_LABELS = pa.array(["b", "a"]).dictionary_encode()


@pytest.mark.parametrize("kind", KINDS)
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
            r"pc.divide.column.cast.pyarrow.int64..., 1000",
            lambda c: pc.divide(c.cast(pa.int64()), 1000),
            [1, 61],
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
def test_columns_of_other_rows_are_refused_with_a_remedy(
    tmp_path, kind, values, found, type_name, remedy, expected
):
    table = pa.table({"odd": values, "fine": [1, 2]})
    KINDS[kind](table, tmp_path / f"x.{kind}")
    rule = rf"rows of one size that are numbers, and 1 of the 2 of .*x\.{kind} has others. 'odd' is {found}"
    with pytest.raises(TypeError, match=rf"{rule}.*{type_name}.*Convert it, .*columns=\['fine'\]"):
        feedline.open_source(tmp_path / f"x.{kind}")
    assert list(feedline.open_source(tmp_path / f"x.{kind}", columns=["fine"]).spec) == ["fine"]
    KINDS[kind](table.set_column(0, "odd", remedy(table["odd"])), tmp_path / f"y.{kind}")
    source = feedline.open_source(tmp_path / f"y.{kind}", columns=["odd"])
    out = np.empty((2, *source.spec["odd"].shape), source.spec["odd"].dtype)
    source.read(np.arange(2), {"odd": out})
    assert out.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [False, True])
def test_all_columns_that_cannot_be_read_are_listed(tmp_path, kind, text):
    odd = {"when": _TIMES, "label": _LABELS, "price": pa.array([1, 2], pa.decimal128(9))}
    KINDS[kind](
        pa.table({**odd, "fine": [1, 2], **({"text": ["a", "b"]} if text else {})}), tmp_path / f"x.{kind}"
    )
    with pytest.raises(TypeError) as caught:
        feedline.open_source(tmp_path / f"x.{kind}")
    assert re.findall(r"'(\w+)' is (\w+)[^:]*: (\w+)", str(caught.value)) == [
        ("when", "timestamp", "count"),
        ("label", "dictionary", "take"),
        ("price", "decimal128", "cast"),
    ]
    assert f"3 of the {5 if text else 4} of" in str(caught.value)
    assert f"leave them out: columns=['fine'{', ' + repr('text') if text else ''}]" in str(caught.value)


def test_a_table_of_many_such_columns_lists_some(tmp_path):
    KINDS["parquet"](pa.table({f"c{i}": _TIMES for i in range(30)}), tmp_path / "x.parquet")
    with pytest.raises(TypeError, match=r"30 of the 30 of .*'c19' is [^']*; … 10 more. Convert them, .* shows$"):
        feedline.open_source(tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_named(tmp_path, kind):
    KINDS[kind](_table(_rows(300)), tmp_path / f"ok.{kind}")
    (tmp_path / f"cut.{kind}").write_bytes((tmp_path / f"ok.{kind}").read_bytes()[:-100])
    (tmp_path / f"text.{kind}").write_text("no columns are in this file")
    (tmp_path / f"empty.{kind}").touch()
    for name in ("cut", "text", "empty"):
        with pytest.raises(ValueError, match=rf"{name}\.{kind} cannot be read as an? (Parquet|Arrow) file"):
            feedline.open_source(tmp_path / f"{name}.{kind}")
    with pytest.raises(FileNotFoundError, match=rf"there is no file .*gone\.{kind}; check the path"):
        feedline.open_source(tmp_path / f"gone.{kind}")
    (tmp_path / f"folder.{kind}").mkdir()
    with pytest.raises(ValueError, match=rf"is a folder; pass a glob .*folder\.{kind}/\*\.{kind}"):
        feedline.open_source(tmp_path / f"folder.{kind}")
    for none in (pa.int64(), pa.string()):
        KINDS[kind](pa.table({"x": pa.array([], none)}), tmp_path / f"none.{kind}")
        with pytest.raises(ValueError, match="at least one row"):
            feedline.open_source(tmp_path / f"none.{kind}")


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


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_do_not_fit_together_are_refused(tmp_path, kind):
    KINDS[kind](pa.table({"x": [1, 2]}), tmp_path / f"a.{kind}")
    KINDS[kind](pa.table({"x": [1.0, 2.0]}), tmp_path / f"b.{kind}")
    with pytest.raises(ValueError, match=r"must agree in.*float64.*int64"):
        feedline.open_source(tmp_path / f"?.{kind}")


@pytest.mark.parametrize("name", _rows(1))
def test_a_part_of_a_column_is_viewed_from_where_it_starts(name):
    whole = _rows(50)
    column = _table(whole).column(name).combine_chunks().slice(7, 20)
    np.testing.assert_array_equal(rows_of(column, name).values, whole[name][7:27])


def test_names_that_occur_twice_are_refused(tmp_path):
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="has 'x' twice"):
        feedline.open_source(tmp_path / "x.parquet")


def _write_stream(table, path, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=64)


def test_an_arrow_stream_is_mapped_as_a_file_is(tmp_path, is_source_of):
    whole = _rows(300)
    for i, part in enumerate((slice(0, 100), slice(100, 300))):
        _write_stream(_table(whole).slice(part.start, part.stop - part.start), tmp_path / f"{i}.arrow")
    source = feedline.open_source(tmp_path / "*.arrow")
    assert isinstance(source, ArraySource)
    is_source_of(source, whole)


def test_a_stream_that_was_cut_between_two_batches_is_not_a_shorter_one(tmp_path):
    _write_stream(_table(_rows(300)), tmp_path / "x.arrow")
    whole = (tmp_path / "x.arrow").read_bytes()
    for i, cut in enumerate((whole[:-8], whole[: len(whole) // 2], whole + b"more")):
        (tmp_path / f"{i}.arrow").write_bytes(cut)
        with pytest.raises(ValueError, match=rf"{i}\.arrow cannot be read as an Arrow file"):
            feedline.open_source(tmp_path / f"{i}.arrow")


def test_a_compressed_stream_is_read_in_groups(tmp_path, is_source_of):
    whole = _rows(300)
    codes = pa.array(["a", "b"] * 150).dictionary_encode()  # beside the columns that are read
    _write_stream(_table(whole).append_column("codes", codes), tmp_path / "x.arrow", "lz4")
    source = feedline.open_source(tmp_path / "x.arrow", columns=list(whole))
    assert isinstance(source, GroupSource)
    is_source_of(source, whole)


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_decoded_files_are_read_and_not_mapped(tmp_path, kind):
    """A disk that fails under a mapped file ends the process."""
    KINDS[kind](_table(_rows(300)), tmp_path / f"x.{kind}")
    source = feedline.open_source(tmp_path / f"x.{kind}")
    source.read(
        np.arange(300), {name: np.empty((300, *row.shape), row.dtype) for name, row in source.spec.items()}
    )
    assert str(tmp_path / f"x.{kind}") not in Path("/proc/self/maps").read_text()


def test_columns_whose_names_begin_alike_are_distinguished(tmp_path):
    pq.write_table(pa.table({"x.y": [1, 2], "x": [3, 4]}), tmp_path / "x.parquet")
    source, out = feedline.open_source(tmp_path / "x.parquet", columns=["x"]), np.empty(2, np.int64)
    source.read(np.arange(2), {"x": out})
    assert out.tolist() == [3, 4]


def test_a_missing_library_is_an_error_with_the_line_that_installs_it(tmp_path, monkeypatch):
    for kind in ("parquet", "arrow"):
        (tmp_path / f"x.{kind}").touch()
        for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
            monkeypatch.setitem(sys.modules, module, None)  # so that importing it fails
        with pytest.raises(
            ImportError, match=rf"pyarrow reads this format .*; from the clone: pip install '\.\[{kind}\]'"
        ):
            feedline.open_source(tmp_path / f"x.{kind}")
