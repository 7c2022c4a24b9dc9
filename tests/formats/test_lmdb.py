"""LMDB files beyond what test_conformance.py tries: what lmdb wrote is what is read."""

import os
import threading

import numpy as np
import pytest

import feedline

lmdb = pytest.importorskip("lmdb")
RANDOM = np.random.default_rng(0)
ENTRIES = {RANDOM.bytes(int(n % 40) + 1): RANDOM.bytes(int(n)) for n in RANDOM.integers(0, 20_000, 300)}
ORDERED = sorted(ENTRIES)


def written(path, entries=ENTRIES, **options):
    with (
        lmdb.open(str(path), lock=False, map_size=1 << 25, **options) as env,
        env.begin(write=True) as transaction,
    ):
        for key, value in entries.items():
            transaction.put(key, value)
    return path


@pytest.mark.parametrize("form", ["file", "folder"])
def test_entries_come_in_the_order_of_their_keys(tmp_path, form):
    path = written(tmp_path / "x.lmdb", subdir=form == "folder")
    source = feedline.open_source(path / "data.mdb" if form == "folder" else path)
    rows = RANDOM.permutation(len(ENTRIES))
    assert source.records(rows) == [{"key": ORDERED[row], "value": ENTRIES[ORDERED[row]]} for row in rows]
    values = feedline.open_source(source.file_of(0), columns=["value"])
    assert values[-1] == ENTRIES[ORDERED[-1]]
    assert "row bytes" in repr(values)


def test_two_sources_of_a_file_and_many_threads(tmp_path):
    path, failures = written(tmp_path / "x.lmdb", subdir=False), []
    sources = [feedline.open_source(path, columns=["value"]) for _ in range(2)]

    def read(seed):
        rows = np.random.default_rng(seed).integers(0, len(ENTRIES), 200)
        if sources[seed % 2].records(rows) != [ENTRIES[ORDERED[row]] for row in rows]:
            failures.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_what_is_refused(tmp_path):
    path = written(tmp_path / "x.lmdb", subdir=False)
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True),
        pytest.raises(ValueError, match=r"x\.lmdb' is already open in this process.*; close it where"),
    ):
        feedline.open_source(path)
    source = feedline.open_source(path)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(ValueError, match=r"x\.lmdb must have \d+ bytes, and has \d+; it is truncated"):
        feedline.open_source(path)
    with pytest.raises(feedline.FeedError, match="must not change while a feed reads it"):
        source[0]
