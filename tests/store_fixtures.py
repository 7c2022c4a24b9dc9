"""A store on this machine for each test, and a cache of its own."""

import pickle

import numpy as np
import pytest
from rows_read import read_rows, same
from store_server import serving

import feedline
from feedline._src.files import hedging
from feedline._src.files.client import clients
from feedline._src.files.fetcher import fetcher


@pytest.fixture
def store(monkeypatch):
    # otherwise, a busy machine would send some requests twice, or give them up
    monkeypatch.setattr(hedging, "_SHARE", 0.0)
    monkeypatch.setattr("feedline._src.files.client._SHORTEST_S", 60.0)
    with serving() as served:
        yield served
        for request in tuple(fetcher()._running):
            request.cancel()  # else it would be repeated, and logged, during the next tests
    clients.clear()  # they keep some 20 connections open for each store, and the limit may be 1,000 files


@pytest.fixture
def options(tmp_path):
    return feedline.Store(cache=tmp_path / "cache", patience_s=100)


@pytest.fixture
def bucket(store, monkeypatch):
    """The store, which s3:// and gs:// also mean here. Its paths "/corpus/…" form the bucket "corpus"."""
    for name, value in store.variables().items():
        monkeypatch.setenv(name, value)
    clients.clear()
    return store


@pytest.fixture
def as_local(store, options, tmp_path):
    """Check that an object reads like the same file on local disk, also from a pickled copy and after `close`."""

    def check(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        store.objects[f"/{name}"] = data
        local, remote = feedline.open_source(path), feedline.open_source(f"{store.url}/{name}", store=options)
        assert (len(remote), remote.identity) == (len(local), local.identity)
        assert (
            repr(remote).partition(":")[2]
            == repr(local).replace(str(path), f"{store.url}/{name}").partition(":")[2]
        )
        if hasattr(remote, "records"):
            assert remote.file_of(3) == f"{store.url}/{name}"
        rows = np.random.default_rng(6).integers(0, len(local), 100)
        for source in (remote, pickle.loads(pickle.dumps(remote))):
            will_read = getattr(source, "will_read", None)
            assert will_read is None or will_read(rows, 0)
            same(read_rows(source, rows), read_rows(local, rows))
            same(source[int(rows[0])], local[int(rows[0])])
        remote.close()
        same(read_rows(remote, rows), read_rows(local, rows))  # as the next feed does

    return check
