"""Groups of rows: what is read is checked, and a file that changed is an error and no bad row."""

import os

import jax
import numpy as np
import pyarrow as pa
import pytest
from rows_read import read_rows

import feedline
from feedline._src.files.files import Files
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import Column, Grouped
from feedline._src.sources.groups import open_groups


def _source(path, column, leaf, lengths=(4, 4)):
    """A source of one leaf; each of its groups is read as `column`."""
    path.touch()
    table = Grouped({"x": leaf}, [lengths], lambda leaf, group: column)
    return open_groups(lambda file, options: table, Files([str(path)]), OpenOptions())


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (Column(np.zeros((3, 2), np.int16)), r"int16\[3, 2\]"),
        (Column(np.zeros((4, 2), np.int32)), r"int32\[4, 2\]"),
        (Column(np.zeros((4, 4), np.int16)[:, ::2]), r"int16\[4, 2\]"),  # with gaps between its numbers
        (Column(np.zeros(0, np.uint8), np.zeros(4, np.int32)), "3 rows of bytes"),
    ],
)
def test_a_group_that_is_not_what_was_promised_is_refused(tmp_path, column, found):
    is_bytes = column.ends is not None
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


def test_a_mapped_arrow_file_that_is_cut_is_an_error_and_no_signal(tmp_path):
    path, table = tmp_path / "x.arrow", pa.table({"x": np.arange(100_000)})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    source = feedline.open_source(path)
    os.truncate(path, 8192)
    told = (
        r"must not change while a feed reads it, and its size changed from 8\d+ to 8192 bytes since the source was"
    )
    with pytest.raises(feedline.FeedError, match=told):
        read_rows(source, np.arange(99_000, 100_000))


def _counting(path, decoded, **options):
    """A source of the numbers 0 to 639 in groups of 64. It notes each group that it decodes in `decoded`."""
    path.touch()

    def read(leaf, group):
        decoded.append(group)
        return Column(np.arange(64 * group, 64 * (group + 1)))

    table = Grouped({"x": jax.ShapeDtypeStruct((), np.dtype(np.int64))}, [[64] * 10], read)
    return open_groups(lambda file, given: table, Files([str(path)]), OpenOptions(**options))


def test_a_group_is_decoded_once_while_it_is_cached(tmp_path):
    source = _counting(tmp_path / "made.up", decoded := [])
    for start in range(0, 640, 32):
        read_rows(source, np.arange(start, start + 32))
    assert decoded == list(range(10))
    source.close()
    read_rows(source, np.arange(32))
    assert decoded == [*range(10), 0]


@pytest.mark.parametrize("cache_bytes", [0, 3 * 64 * 8, 1 << 30])
def test_rows_of_more_groups_than_the_cache_holds_are_read(tmp_path, cache_bytes):
    source, rows = _counting(tmp_path / "made.up", [], cache_bytes=cache_bytes), np.arange(639, -1, -7)
    np.testing.assert_array_equal(read_rows(source, rows)["x"], rows)


def test_a_blocked_order_decodes_each_group_once(tmp_path, sharding, delivered):
    window = 2 * 64 * 8  # bytes
    source = _counting(tmp_path / "made.up", decoded := [], cache_bytes=window)
    order = feedline.Order(shuffle=feedline.Blocks(rows=64, window=2))
    feed = feedline.Feed(source, 32, sharding, order=order, epochs=1, reading=feedline.Reading(threads=1))
    got = np.concatenate([batch["x"] for batch in delivered(feed)])
    np.testing.assert_array_equal(np.sort(got), np.arange(640))
    assert sorted(decoded) == list(range(10))
