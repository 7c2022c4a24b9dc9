"""LMDB files beyond what test_conformance.py tries: what lmdb wrote is what is read."""

import os

import lmdb
import numpy as np
import pytest

import feedline

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


@pytest.mark.parametrize("name", ["x.lmdb", "x.lmdb/data.mdb", "x.lmdb/*.mdb", "file"])
def test_entries_come_in_the_order_of_their_keys(tmp_path, name):
    path = written(tmp_path / "x.lmdb", subdir=name != "file")
    if name != "file":
        (path / "lock.mdb").touch()
    source = feedline.open_source(path if name == "file" else tmp_path / name)
    rows = RANDOM.permutation(len(ENTRIES))
    assert source.records(rows) == [{"key": ORDERED[row], "value": ENTRIES[ORDERED[row]]} for row in rows]
    values = feedline.open_source(source.file_of(0), columns=["value"])
    assert values[-1] == ENTRIES[ORDERED[-1]]
    twice = feedline.open_source(source.file_of(0), columns=["key", "key", "value"])
    assert twice[-1] == source[-1]
    assert "row bytes" in repr(values)


@pytest.mark.parametrize("dupsort", [False, True])
def test_named_databases_are_refused(tmp_path, dupsort):
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, max_dbs=2) as env:
        inner = env.open_db(b"inner", dupsort=dupsort)
        with env.begin(write=True) as transaction:
            transaction.put(b"first", b"1")
            transaction.put(b"key", b"2", db=inner)
    with pytest.raises(ValueError, match=r"x\.lmdb has a database named b'inner'; copy its entries"):
        feedline.open_source(tmp_path / "x.lmdb")


def test_a_value_may_look_like_a_named_database(tmp_path):
    with lmdb.open(str(tmp_path / "names.lmdb"), subdir=False, max_dbs=2) as env:
        env.open_db(b"inner")
        with env.begin() as transaction:
            value = transaction.get(b"inner")
    source = feedline.open_source(written(tmp_path / "x.lmdb", {b"inner": value}, subdir=False))
    assert source[0] == {"key": b"inner", "value": value}


def test_a_folder_of_another_name_says_which_file_to_open(tmp_path):
    written(tmp_path / "x")
    (tmp_path / "x" / "lock.mdb").touch()
    with pytest.raises(ValueError, match=r"by a path or a glob: open_source\('.*/x/\*.mdb'\)"):
        feedline.open_source(tmp_path / "x")


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
