"""Blocks that are evicted while they are fetched, read and waited for: no read finds one that is not mapped."""

import itertools
import os
import threading
import weakref
from typing import ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.stores import residency

BLOCK = 1 << 21


@pytest.fixture
def source(store, options):
    store.objects["/x.bin"] = b"".join(bytes([i]) * BLOCK for i in range(8))
    return feedline.open_source(f"{store.url}/x.bin", dtype=np.dtype((np.uint8, BLOCK)), store=options)


@pytest.fixture
def item(source):
    (found,) = source._opened._objects.by_url.values()
    return found


def values(source, rows):
    out = np.empty((len(rows), BLOCK), np.uint8)
    source.read(np.array(rows), out)
    return out[:, ::4096].max(axis=1).tolist()


def evict(item, block):
    """Delete the block from the cache folder, as another process does, and let the source notice it."""
    cache = item._residency.cache
    os.unlink(cache.path(item.name(block)))
    cache.evictions += 1
    item._residency._maintain()


def is_mapped(item, block):
    path = item._residency.cache.path(item.name(block))
    with open("/proc/self/maps") as maps:
        return any(path in line for line in maps)


def test_a_block_that_was_evicted_while_its_request_stores_others_is_fetched_anew(source, item, monkeypatch):
    """The request that fetched it is still under way, and will not map it a second time."""
    cache, reached, go_on = item._residency.cache, threading.Event(), threading.Event()
    store = cache.store

    def pausing(name, data):
        if name == item.name(1):
            reached.set()
            assert go_on.wait(60)
        return store(name, data)

    monkeypatch.setattr(cache, "store", pausing)
    (request,) = item.fetch([0, 1])
    assert reached.wait(60)
    evict(item, 0)
    with item._residency.reading():
        pass  # unmaps it
    assert not is_mapped(item, 0)
    found = []
    reader = threading.Thread(target=lambda: found.append(values(source, [0])))
    reader.start()
    reader.join(20)
    alive = reader.is_alive()
    if not alive:
        go_on.set()
    assert not alive, "it waits for the old request"
    assert found == [[0]]
    request.result(20)
    assert values(source, [0, 1, 7]) == [0, 1, 7]


def test_evicted_blocks_stay_mapped_until_the_last_read_that_began_before_has_ended(source, item):
    assert values(source, [0, 1]) == [0, 1]
    residency = item._residency
    with residency.reading():
        residency.wait_for(item.blocks_of(0, BLOCK))
        evict(item, 0)
        with residency.reading():  # a later one fetches the block again, at the same addresses
            residency.wait_for(item.blocks_of(0, BLOCK))
            evict(item, 0)
        assert item.memory[0] == 0
        assert is_mapped(item, 0)
    assert not is_mapped(item, 0)
    assert values(source, [0]) == [0]


def test_a_block_that_is_fetched_again_before_it_is_unmapped_stays(source, item):
    residency = item._residency
    with residency.reading():
        residency.wait_for(item.blocks_of(0, BLOCK))
        evict(item, 0)
        assert values(source, [0]) == [0]
    assert is_mapped(item, 0)


def test_a_read_that_fails_lets_go_of_evicted_blocks(store, source, item):
    assert values(source, [0]) == [0]
    store.fault = lambda *request: 403
    with item._residency.reading():
        evict(item, 0)
        with pytest.raises(feedline.FeedError, match="403"):
            values(source, [0, 1])
        assert is_mapped(item, 0)
    assert not is_mapped(item, 0)


def test_blocks_that_arrive_after_a_source_was_closed_do_no_harm(source, item, monkeypatch):
    """Closing gives up a request at once, while a thread still stores and maps its blocks."""
    cache, reached, go_on, ended = item._residency.cache, *(threading.Event() for _ in range(3))
    store, keep = cache.store, item._keep

    def pausing(name, data):
        reached.set()
        assert go_on.wait(60)
        return store(name, data)

    def keeping(run, data):
        keep(run, data)
        ended.set()

    monkeypatch.setattr(cache, "store", pausing)
    monkeypatch.setattr(item, "_keep", keeping)
    item.fetch([0])
    assert reached.wait(60)
    source.close()
    monkeypatch.setattr(cache, "store", store)
    assert values(source, [0, 1]) == [0, 1]
    evict(item, 0)
    with item._residency.reading():
        item._residency.wait_for(item.blocks_of(0, BLOCK))
        go_on.set()
        assert ended.wait(60)
        assert item.memory[0] == 0
    assert values(source, [0, 7]) == [0, 7]


class Told:
    """Rows in memory, whose source need be told of reads at every second look."""

    spec: ClassVar = {"x": jax.ShapeDtypeStruct((), np.int32)}
    identity: ClassVar = {}
    looks = 0

    @property
    def will_read(self):
        self.looks += 1
        return (lambda rows, ahead: True) if self.looks % 2 else None

    def __len__(self):
        return 64

    def read(self, rows, out):
        out["x"][:] = rows

    def close(self):
        pass


def test_the_last_block_may_arrive_while_a_source_is_told_what_comes_next():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed(Told(), 16, sharding, epochs=1) as feed:
        assert len(list(feed)) == 4
    mixture = feedline.Mixture({"a": Told(), "b": Told()}, {"a": 1, "b": 1})
    assert all(mixture._will_read(np.arange(128), 0) for _ in range(3))


def test_blocks_that_were_read_long_ago_are_unmapped_where_the_process_has_many_whichever_source_has_them(
    store, options, monkeypatch
):
    """Linux allows a process some 65,000 mappings; here it is as if that were 10 blocks."""
    monkeypatch.setattr(residency, "most_mapped", lambda: 10)
    monkeypatch.setattr(residency, "_now", itertools.count(1).__next__)
    monkeypatch.setattr(residency, "_sources", weakref.WeakSet())  # without those of other tests
    for name in "abc":
        store.objects[f"/{name}.bin"] = b"".join(bytes([i]) * BLOCK for i in range(8))
    sources = [
        feedline.open_source(f"{store.url}/{name}.bin", dtype=np.dtype((np.uint8, BLOCK)), store=options)
        for name in "abc"
    ]
    for _ in range(2):
        for source in sources:
            for row in range(8):
                assert values(source, [row]) == [row]
                assert blocks_mapped(options) <= 11
    assert values(sources[0], range(8)) == [*range(8)]  # one read that needs almost all
    counts = [source._opened._objects.residency.mapped for source in sources]
    assert sum(counts) == blocks_mapped(options)
    assert counts[0] == 8  # those of the others were older


def test_a_complete_source_that_nobody_reads_is_unmapped_before_one_that_is_read(store, options, monkeypatch):
    monkeypatch.setattr(residency, "most_mapped", lambda: 10)
    monkeypatch.setattr(residency, "_now", itertools.count(1).__next__)
    monkeypatch.setattr(residency, "_sources", weakref.WeakSet())  # without those of other tests
    for name in "ab":
        store.objects[f"/{name}.bin"] = b"".join(bytes([i]) * BLOCK for i in range(8))
    idle, training = (
        feedline.open_source(f"{store.url}/{name}.bin", dtype=np.dtype((np.uint8, BLOCK)), store=options)
        for name in "ab"
    )
    assert values(idle, range(8)) == [*range(8)]
    assert idle._opened._objects.residency.is_complete
    for _ in range(2):
        for row in range(8):
            assert values(training, [row]) == [row]
    assert idle._opened._objects.residency.mapped <= 2
    assert training._opened._objects.residency.mapped == 8


def blocks_mapped(options):
    with open("/proc/self/maps") as maps:
        return sum(str(options.cache) in line for line in maps)
