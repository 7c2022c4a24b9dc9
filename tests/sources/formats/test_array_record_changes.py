"""ArrayRecord files that change while they are read, and too many of them."""

import os
import pickle
import resource

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import feedline
from feedline._src.errors import FeedError, RowError

COUNT = 5000


def write(path, first):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for i in range(COUNT):
        writer.write(np.int32(first + i).tobytes())
    writer.close()
    return path


def opened(path):
    return feedline.open_source(path, dtype=np.int32)


def read(source, *rows):
    out = np.zeros(len(rows), np.int32)
    source.read(np.array(rows), out)
    return out.tolist()


def test_a_file_that_is_truncated_or_written_to_ends_the_feed(tmp_path, sharding):
    path = write(tmp_path / "x.array_record", 0)
    reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=10**6, threads=1)
    with feedline.Feed(opened(path), 8, sharding, reading=reading) as feed:
        next(feed)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(FeedError, match=r"it has \d+ bytes and had \d+ since the source was opened") as error:
            list(zip(range(1000), feed, strict=False))
        assert not isinstance(error.value, RowError)
        assert error.value.file == str(path)


def test_a_replaced_file_stays_readable_where_it_is_open_and_is_refused_elsewhere(tmp_path):
    path = write(tmp_path / "x.array_record", 0)
    source = opened(path)
    pickled = pickle.dumps(source)
    assert read(pickle.loads(pickled), 7) == [7]
    os.replace(write(tmp_path / "new.array_record", 9000), path)
    assert read(source, 0, COUNT - 1, 77) == [0, COUNT - 1, 77]
    for use in (lambda: pickle.loads(pickled), lambda: source.identity):
        with pytest.raises(FeedError, match="another file lies at its path since the source was opened"):
            use()
    path.write_bytes(b"")
    with pytest.raises(FeedError, match="it has 0 bytes and had"):
        pickle.loads(pickled)


@pytest.mark.slow
def test_too_many_open_files_is_an_error(tmp_path):
    for i in range(40):
        write(tmp_path / f"{i}.array_record", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with pytest.raises(OSError, match=r"each file of a source stays open, .* merge shards: .*\.array_record"):
            opened(tmp_path / "*.array_record")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
