"""A store on this machine for each test, and a cache of its own."""

import pytest
from store_server import serving

import feedline
from feedline._src.stores.client import client_of
from feedline._src.stores.fetcher import fetcher


@pytest.fixture
def store():
    fetcher()._durations.clear()  # what is late for one test is not for another
    fetcher().counts.hedged = 0
    with serving() as served:
        yield served
    client_of.cache_clear()  # keeps connections open: some 20 for each store, and 1,000 files may be the limit


@pytest.fixture
def options(tmp_path):
    return feedline.Store(cache=tmp_path / "cache", patience_s=10)


@pytest.fixture
def bucket(store, monkeypatch):
    """The store as that of s3:// and gs://, of which "/corpus/…" is the bucket "corpus"."""
    for name, value in store.variables().items():
        monkeypatch.setenv(name, value)
    client_of.cache_clear()
    return store
