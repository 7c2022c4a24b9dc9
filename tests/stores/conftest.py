"""A store on this machine for each test, and a cache of its own."""

import pytest
from store_server import serving

import feedline


@pytest.fixture
def store():
    with serving() as served:
        yield served


@pytest.fixture
def options(tmp_path):
    return feedline.Store(cache=tmp_path / "cache", patience_s=10)
