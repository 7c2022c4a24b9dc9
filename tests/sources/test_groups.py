"""Groups of rows: what is read is checked, and a file that changed is an error and no bad row."""

import os
import pickle
import sys

import jax
import numpy as np
import programs
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import feedline
from feedline._src.files.files import Files
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import ByteColumn, Grouped, NumberColumn
from feedline._src.sources.groups import open_groups

KINDS = {
    "parquet": lambda table, path, rows: pq.write_table(table, path, row_group_size=rows),
    "feather": lambda table, path, rows: feather.write_feather(
        table, str(path), compression="lz4", chunksize=rows
    ),
}


def _source(path, column, leaf, lengths=(4, 4)):
    """Of one leaf; each group is read as `column`."""
    path.touch()
    table = Grouped({"x": leaf}, [lengths], lambda leaf, group: column)
    return open_groups(lambda file, options: table, Files([str(path)]), OpenOptions())


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (NumberColumn(np.zeros((3, 2), np.int16)), r"int16\[3, 2\]"),
        (NumberColumn(np.zeros((5, 2), np.int16)), r"int16\[5, 2\]"),
        (NumberColumn(np.zeros((4, 1), np.int16)), r"int16\[4, 1\]"),
        (NumberColumn(np.zeros((4, 2), np.int32)), r"int32\[4, 2\]"),
        (NumberColumn(np.zeros((4, 4), np.int16)[:, ::2]), r"int16\[4, 2\]"),  # with gaps between its numbers
        (ByteColumn(np.zeros(4, np.int32), np.zeros(0, np.uint8)), "3 rows of bytes"),
    ],
)
def test_a_group_that_is_not_what_was_promised_is_refused(tmp_path, column, found):
    is_bytes = isinstance(column, ByteColumn)
    leaf, promised = "bytes", "4 rows of bytes"
    if not is_bytes:
        leaf, promised = jax.ShapeDtypeStruct((2,), np.dtype(np.int16)), r"int16\[4, 2\]"
    with pytest.raises(
        feedline.RowError, match=rf"metadata promises, {promised}, and it holds {found}; the file is damaged"
    ) as error:
        _ = _source(tmp_path / "made.up", column, leaf)[5]
    assert (error.value.row, error.value.file) == (4, str(tmp_path / "made.up"))


@pytest.mark.parametrize("lengths", [[4, -1], [1 << 48, 1]])
def test_numbers_of_rows_that_cannot_be_are_refused(tmp_path, lengths):
    with pytest.raises(ValueError, match=r"and the metadata of .*made\.up promises"):
        _source(tmp_path / "made.up", None, "bytes", lengths)


def _replaced(path, kind, start):
    """The same rows in shorter groups, in another file at the same path."""
    KINDS[kind](pa.table({"x": np.arange(1000) + start}), path.with_suffix(".new"), 25)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda path, kind: _replaced(path, kind, 0), "it has"),
        (lambda path, kind: os.truncate(path, path.stat().st_size // 2), "bytes and had"),
        (lambda path, kind: os.utime(path, ns=(1, 1)), "it was written to"),
        (lambda path, kind: os.remove(path), "it cannot be found any more"),
    ],
    ids=["replaced", "truncated", "written", "removed"],
)
def test_a_file_that_changed_is_an_error_of_the_feed_and_of_no_row(tmp_path, kind, change, found):
    path = tmp_path / f"x.{kind}"
    KINDS[kind](pa.table({"x": np.arange(1000)}), path, 250)
    source, out = feedline.open_source(path), {"x": np.empty(300, np.int64)}
    source.read(np.arange(250), {"x": out["x"][:250]})
    travelled = pickle.dumps(source)
    change(path, kind)
    source.read(np.arange(250), {"x": out["x"][:250]})  # is kept, and is what it was
    np.testing.assert_array_equal(out["x"][:250], np.arange(250))
    for ask in (
        lambda: source.read(np.arange(200, 500), out),
        lambda: source.identity,
        lambda: pickle.loads(travelled),
    ):
        with pytest.raises(
            feedline.FeedError, match=f"a file must not change while a feed reads it.*{found}"
        ) as e:
            ask()
        assert type(e.value) is feedline.FeedError  # a RowError could be replaced by another row
        assert e.value.file == str(path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_replaced_file_ends_a_feed_that_substitutes_bad_rows(tmp_path, sharding, workers):
    path = tmp_path / "x.parquet"
    KINDS["parquet"](pa.table({"x": np.arange(1000)}), path, 250)
    reading = feedline.Reading(threads=None if workers else 1, workers=workers, bad_rows="substitute")
    with feedline.Feed(feedline.open_source(path), 16, sharding, reading=reading) as feed:
        _replaced(path, "parquet", start=10**6)
        with pytest.raises(feedline.FeedError, match=r"must not change while a feed reads it.*x\.parquet"):
            next(feed)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_mapped_arrow_file_that_is_cut_is_an_error_and_no_signal(tmp_path, stream):
    path, table = tmp_path / "x.arrow", pa.table({"x": np.arange(100_000)})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table)
    script = f"""
import os, feedline, numpy as np
source = feedline.open_source({str(path)!r})
os.truncate({str(path)!r}, 8192)
try:
    source.read(np.arange(99_000, 100_000), {{"x": np.empty(1000, np.int64)}})
except feedline.FeedError as error:
    print(error)
"""
    run = programs.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "a file must not change while a feed reads it, and it has 8192 bytes and had 8" in run.stdout


def test_a_glob_of_files_of_which_one_changed(tmp_path):
    for i in range(3):
        KINDS["feather"](pa.table({"x": np.arange(100) + 100 * i}), tmp_path / f"{i}.feather", 50)
    source = feedline.open_source(tmp_path / "*.feather")
    _replaced(tmp_path / "1.feather", "feather", 0)
    out = np.empty(100, np.int64)
    for start in (0, 200):
        source.read(np.arange(start, start + 100), {"x": out})
        np.testing.assert_array_equal(out, np.arange(start, start + 100))
    with pytest.raises(feedline.FeedError, match=r"1\.feather"):
        source.read(np.arange(100, 200), {"x": out})
