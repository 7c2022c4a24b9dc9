"""A cache folder that is deleted again and again while sources are opened and read: a miss, and never an error."""

import concurrent.futures
import contextlib
import io
import os
import pickle
import shutil
import threading

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from test_arrays_in_stores import ROWS, npy
from test_records_in_stores import RECORDS, tar
from test_requests import zarr

import feedline
from feedline._src.files.cache import Cache


@contextlib.contextmanager
def deleted_all_the_time(folder):
    done = threading.Event()

    def delete():
        while not done.wait(0.001):
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def array_record(path):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in RECORDS:
        writer.write(record)
    writer.close()
    return path.read_bytes()


@pytest.fixture(params=["npy", "tar", "array_record", "zarr"])
def url(request, store, tmp_path):
    if request.param == "zarr":
        return zarr(store, tmp_path)
    made = {
        "npy": lambda: npy(ROWS),
        "tar": lambda: tar(RECORDS),
        "array_record": lambda: array_record(tmp_path / "x"),
    }
    store.objects[f"/x.{request.param}"] = made[request.param]()
    return f"{store.url}/x.{request.param}"


def rows_of(source):
    return [source[row] for row in range(0, len(source), len(source) // 20)]


@pytest.mark.slow
def test_a_cache_that_is_deleted_all_the_time_changes_no_row(url, options):
    expected = rows_of(feedline.open_source(url, store=options))
    with deleted_all_the_time(options.folder):
        for _ in range(3):
            source = feedline.open_source(url, store=options)
            for each in (source, pickle.loads(pickle.dumps(source))):
                np.testing.assert_equal(rows_of(each), expected)
            source.close()


def test_a_source_that_was_opened_before_its_cache_was_deleted_reads_on(url, options):
    source = feedline.open_source(url, store=options)
    shutil.rmtree(options.folder)
    found = rows_of(source)
    shutil.rmtree(options.folder, ignore_errors=True)
    np.testing.assert_equal(rows_of(source), found)
    np.testing.assert_equal(rows_of(pickle.loads(pickle.dumps(source))), found)
    assert source.identity


def hdf5(path):
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", data=[np.frombuffer(each, np.uint8) for each in RECORDS], dtype=h5py.vlen_dtype("u1")
        )
    return path.read_bytes()


def lmdb(path):
    import lmdb

    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 25) as env, env.begin(write=True) as entries:
        for number, each in enumerate(RECORDS):
            entries.put(b"%03d" % number, each)
    return path.read_bytes()


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, 3 << 12),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("write", [array_record, hdf5, lmdb])
def test_a_whole_file_of_the_cache_that_is_damaged_in_use_is_fetched_again(
    store, options, tmp_path, write, damage
):
    pytest.importorskip({"hdf5": "h5py"}.get(write.__name__, write.__name__))
    name = f"x.{write.__name__}"
    store.objects[f"/{name}"] = write(tmp_path / name)
    source = feedline.open_source(f"{store.url}/{name}", store=options)
    found = rows_of(source)
    for _ in range(2):
        for path in options.cache.rglob("*.whole"):
            DAMAGE[damage](path)
        np.testing.assert_equal(rows_of(source), found)
    assert list(options.cache.rglob("*.whole")) or (damage == "deleted" and write is not hdf5)
    if write is not lmdb:
        assert found == rows_of(RECORDS)


def test_threads_that_use_a_cache_do_not_mind_that_it_is_deleted(tmp_path):
    """Another program may have deleted the folder before each of their system calls."""
    folder = str(tmp_path / "cache")
    cache = Cache(folder, 100_000)

    def use(_):
        for i in range(200):
            name, data = f"{i % 40:040}", bytes([i % 40]) * 5000
            file = cache.open(name, 5000)
            cache.write(file, 0, data)
            assert os.pread(file.descriptor, 5000, 0) == data
            assert cache.get(name, 5000) in (None, data)
            cache.has(name)
            assert cache.find_whole(name, 5000) or cache.make_whole(name, 5000, io.BytesIO(data))
            Cache(folder, None)

    with deleted_all_the_time(folder), concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(use, range(3)))
