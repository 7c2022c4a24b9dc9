"""TFRecord files: records as written, whatever their lengths and files; damage; checksums."""

import gzip
import json
import os
import random
import struct
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from background import PATIENCE_S, spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.record_writer import RecordWriter
from tfrecords import encoded, masked

import feedline
from feedline._src.rows import digests

RECORDS = [b"first", b"", b"\0" * 5000, bytes(range(256)) * 40, b"last"]


@pytest.mark.parametrize(
    "name", ["x.tfrecord", "x.tfrecords", "train-00000-of-00001", "x.tfrecord-00000-of-00001"]
)
def test_records_of_another_writer(tmp_path, name):
    """An event file of TensorBoard is a TFRecord file."""
    writer = RecordWriter(str(tmp_path / name))
    for record in RECORDS:
        writer.write(record)
    writer.close()
    assert (tmp_path / name).read_bytes() == encoded(RECORDS)
    source = feedline.open_source(tmp_path / name)
    assert source.records(np.array([4, 4, 0, 2, 1, 3, 0])) == [RECORDS[i] for i in (4, 4, 0, 2, 1, 3, 0)]
    assert repr(source) == f"<TableSource: rows 5, row bytes, from {tmp_path / name}>"


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40_000), max_size=12), min_size=1, max_size=4), st.randoms())
def test_any_rows_of_any_files(tmp_path_factory, files, rng):
    """Several files, some of them empty; small rows that lie near each other are merged into one read."""
    folder = tmp_path_factory.mktemp("shards")
    source_of = random.Random(rng.random())
    contents = [[source_of.randbytes(length) for length in lengths] for lengths in files]
    for i, records in enumerate(contents):
        (folder / f"{i:05}-of-{len(files):05}.tfrecord").write_bytes(encoded(records))
    expected = [record for records in contents for record in records]
    if not expected:
        with pytest.raises(ValueError, match="at least one row"):
            feedline.open_source(folder / "*.tfrecord")
        return
    source = feedline.open_source(folder / "*.tfrecord")
    rows = np.array([rng.randrange(len(expected)) for _ in range(30)])
    assert source.records(rows) == [expected[row] for row in rows]


def test_many_files_need_few_descriptors_and_may_be_closed_while_they_are_read(tmp_path):
    """While a thread reads from a descriptor, its number must not be given to another file."""
    expected = [f"{i}".encode() * 1000 for i in range(200)]
    for i, record in enumerate(expected):
        (tmp_path / f"{i:03}.tfrecord").write_bytes(encoded([record]))

    def opened():
        links = map(Path("/proc/self/fd").joinpath, os.listdir("/proc/self/fd"))
        return sum(link.is_symlink() and os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    source = feedline.open_source(tmp_path / "*.tfrecord")
    assert source.records(np.arange(200)) == expected
    assert 0 < opened() <= 64

    def read():
        return all(source.records(np.arange(200)) == expected for _ in range(4))

    reading = [spawn(read) for _ in range(2)]
    while not any(future.done() for future in reading):
        source.close()
    assert [future.result(PATIENCE_S) for future in reading] == [True] * 2
    source.close()
    assert opened() == 0


SPEC = {"number": jax.ShapeDtypeStruct((), np.int32)}


def to_number(record, out, row):
    out["number"][...] = int(record)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_feed_reads_them_decoded_and_replaces_what_is_damaged(tmp_path, workers, sharding, delivered):
    damaged = bytearray(encoded([b"%d" % i for i in range(64)]))
    damaged[damaged.index(b"17")] ^= 1
    (tmp_path / "train-00000-of-00001").write_bytes(damaged)
    source = feedline.decoded(feedline.open_source(tmp_path / "train-*"), to_number, SPEC)
    reading = feedline.Reading(bad_rows="substitute", workers=workers, quarantine=tmp_path / "bad.jsonl")
    order = feedline.Order(shuffle=False)
    (batch,) = delivered(feedline.Feed(source, 64, sharding, order=order, epochs=1, reading=reading))
    bad = json.loads((tmp_path / "bad.jsonl").read_text())
    assert (bad["row"], bad["file"]) == (17, str(tmp_path / "train-00000-of-00001"))
    assert "does not match its checksum" in bad["error"]
    assert batch["number"].tolist() == [bad["substitute"] if i == 17 else i for i in range(64)]


WHOLE = encoded([b"one", b"two", b"three"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at least one row, got .* with none"),
        (b"id,text\n1,to be or not\n", "must begin with its length and the checksum .*another format"),
        (b"id", "record 0 of .* at byte 0, ends at byte 16 or later, but the file has 2 bytes; it is truncated"),
        (gzip.compress(WHOLE), "compressed as a whole .gunzip it"),
        (zlib.compress(WHOLE), "compressed as a whole"),
        (WHOLE[:-1], "record 2 of .*, at byte 38, ends at byte 59 or later, but the file has 58 bytes; it is"),
        (WHOLE[:45], "record 2 of .*, at byte 38, ends at byte 54 or later, but the file has 45 "),
        (WHOLE[:40] + b"!" + WHOLE[41:], "checksum of the length, and record 2 .* at byte 38, begins with"),
        (WHOLE + bytes(100), "checksum of the length, and record 3"),
        (struct.pack("<QI", 2**64 - 1, masked(b"\xff" * 8)), "byte 18446744073709551631 or later, .* has 12 "),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_no_whole_file(tmp_path, data, message):
    (tmp_path / "x.tfrecord").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        feedline.open_source(tmp_path / "x.tfrecord")
    assert not data or os.listdir(tmp_path) == ["x.tfrecord"]  # no index was written


def test_compressed_files_and_folders_are_refused_by_their_names(tmp_path):
    for name in ("x.tfrecord.gz", "x.tar.zst", "x.tgz", "x-00000-of-00001.gz"):
        with pytest.raises(ValueError, match=r"must not be compressed as a whole, got .*gunzip"):
            feedline.open_source(tmp_path / name)
    (tmp_path / "x.tfrecord").mkdir()
    with pytest.raises(ValueError, match=r"is a folder; pass a glob"):
        feedline.open_source(tmp_path / "x.tfrecord")


def test_a_file_that_was_built_again_is_not_read_by_its_old_index(tmp_path, monkeypatch):
    """A new record may contain an old one with its checksum, just where the old index says."""
    monkeypatch.setattr(digests, "of_samples", lambda size, samples: [size, "samples that miss the change"])
    path = tmp_path / "x.tfrecord"
    path.write_bytes(encoded([b"first", b"inner", b"last" * 10]))
    time, size = path.stat().st_mtime_ns, path.stat().st_size
    assert feedline.open_source(path)[1] == b"inner"
    path.write_bytes(encoded([(bytes(21) + encoded([b"inner"])[12:]).ljust(size - 16)]))
    os.utime(path, ns=(time, time))
    again = feedline.open_source(path)
    with pytest.raises(feedline.FeedError, match=r"rewritten with the same size.*Delete that index") as error:
        again[1]
    assert not isinstance(error.value, feedline.RowError)
    (tmp_path / ".x.tfrecord.feedline-index").unlink()
    assert len(feedline.open_source(path)) == 1
