"""Reads that hang or are slow: a warning and then an error, with stage, rows, file, stacks and ready batches."""

import os
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import feedline

ONE = SingleDeviceSharding(jax.devices()[0])
BATCH = 8


@pytest.fixture
def folder(tmp_path):
    for row in range(64):
        np.int32([row]).tofile(tmp_path / f"{row:02}")
    return tmp_path


def feed_of(folder, seconds_of_row=None, **limits):
    """A feed over the files of a folder, in order. Decoding row i takes `seconds_of_row[i]` seconds, or none."""

    def decode(record, out, row):
        time.sleep((seconds_of_row or {}).get(row.index, 0))
        out[:] = np.frombuffer(record, np.int32)

    source = feedline.decoded(feedline.open_source(folder), decode, jax.ShapeDtypeStruct((1,), np.int32))
    reading = feedline.Reading(threads=1, buffer=1, **limits)
    return feedline.Feed(
        source, BATCH, ONE, order=feedline.Order(shuffle=False), epochs=1, reading=reading, prefetch=1
    )


@pytest.mark.slow
def test_a_read_that_hangs_is_warned_of_and_then_raised(folder, caplog):
    with feed_of(folder, stall_warning_s=2, stall_error_s=5) as feed:
        (folder / "40").rename(folder / "file")
        os.mkfifo(folder / "40")  # opening a pipe waits for a writer
        rows = [row for _ in range(5) for row in next(feed).tolist()]
        with pytest.raises(
            feedline.StallError, match=r"within Reading.stall_error_s = 5 s: no stage has ad"
        ) as told:
            next(feed)
        (record,) = (each for each in caplog.records if "row 40 of" in each.getMessage())
        where = f"a read of 8 rows, the first of them row 40 of {folder}/40, began "
        for message in (record.getMessage(), str(told.value)):
            assert f'the last stage was "read", and 0 later batches are ready; {where}' in message
        assert "in _read\n" in record.getMessage()  # the stack of the reading thread
        assert (told.value.stage, told.value.row, told.value.file) == ("read", 40, f"{folder}/40")
        (folder / "40").rename(folder / "pipe")
        (folder / "file").rename(folder / "40")
        os.close(os.open(folder / "pipe", os.O_WRONLY))  # the read that hung goes on
        rows += [row for batch in feed for row in batch.tolist()]
        assert rows == [[row] for row in range(64)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feedline-read")]


@pytest.mark.slow
def test_a_read_that_is_slow_is_warned_of_and_goes_on(folder, caplog):
    with feed_of(folder, {24: 7}, stall_warning_s=2) as feed:
        rows = [row for batch in feed for row in batch.tolist()]
    assert rows == [[row] for row in range(64)]
    (record,) = (each for each in caplog.records if "row 24 of" in each.getMessage())
    assert f"; a read of 8 rows, the first of them row 24 of {folder}/24, began " in record.getMessage()


def test_sources_know_the_file_of_a_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.arange(10))
        pq.write_table(pa.table({"x": np.arange(10)}), tmp_path / f"{i}.parquet")
    for suffix in ("npy", "parquet"):
        source = feedline.open_source(tmp_path / f"*.{suffix}")
        for row in (0, 9, 10, 19):
            assert source.file_of(row) == f"{tmp_path}/{row // 10}.{suffix}"
    assert feedline._src.sources.arrays.ArraySource([np.zeros(3)]).file_of(0) is None
