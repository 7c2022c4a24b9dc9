"""Arrays in a store: the same rows, identities and batches as from local files; what is fetched, and how."""

import io
import os
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.files.fetcher import fetcher
from feedline._src.native.library import library

BLOCK = 1 << 21
ROWS = np.random.default_rng(0).integers(0, 256, (5000, 3000)).astype(np.uint8)  # 7.2 blocks
LABELS = np.arange(5000, dtype=np.int32)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_feed_of_shards_gives_the_batches_of_the_local_files(store, options, tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    names = [f"{i}.npy" for i in range(4)]
    for i, name in enumerate(names):
        np.save(tmp_path / name, ROWS[1000 * i : 1000 * (i + 1)])
        store.objects[f"/{name}"] = (tmp_path / name).read_bytes()
    np.save(tmp_path / "label.npy", LABELS)
    store.objects["/label.npy"] = (tmp_path / "label.npy").read_bytes()
    store.objects["/x.npy"] = npy(ROWS)
    np.save(tmp_path / "x.npy", ROWS)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def feed(place):
        return feedline.Feed({"x": f"{place}/x.npy", "label": f"{place}/label.npy"}, 64, sharding, epochs=1)

    with feed(tmp_path) as local, feed(store.url) as remote:
        for _ in range(10):
            jax.tree.map(np.testing.assert_array_equal, next(remote), next(local))
        state = remote.get_state()
        requests = len(store.requests)  # others may follow
        asked = remote.statistics()
    assert asked.stores["requests"] >= requests > 0
    assert asked.stores["fetched_bytes"] > ROWS.nbytes // 2
    assert asked.stores["wait_s"] > 0
    assert "B fetched" in str(asked)
    assert "B fetched" in asked._repr_html_()
    assert store.url not in str(state)
    with feed(tmp_path) as moved:  # a state of the remote data continues over the local copy
        moved.set_state(state)
        label = np.asarray(next(moved)["label"])
        np.testing.assert_array_equal(label, moved.rows_of(state))


def test_only_samples_are_fetched_to_open_a_source(store, options):
    store.objects["/x.npy"] = npy(ROWS)
    source = feedline.open_source(f"{store.url}/x.npy", store=options)
    assert source.identity
    gets = store.gets()
    assert len(gets) <= 17
    assert sum(stop - start for start, stop in gets) < 100_000
    store.requests.clear()
    again = feedline.open_source(f"{store.url}/x.npy", store=options)
    assert again.identity == source.identity
    assert [method for method, _, _ in store.requests] == ["HEAD"]  # the samples are in the cache


def test_adjacent_blocks_are_fetched_together_many_at_a_time_and_once(store, options):
    data = bytes(6 * 4 * BLOCK)
    store.objects["/x.bin"] = data
    source = feedline.open_source(f"{store.url}/x.bin", dtype=np.dtype((np.uint8, 1 << 20)), store=options)
    store.latency_s = 0.5
    store.requests.clear()
    rows, out = np.arange(len(source)), np.empty((len(source), 1 << 20), np.uint8)
    threads = [threading.Thread(target=source.read, args=(rows, out.copy())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.gets()) == [(start, start + 2 * BLOCK) for start in range(0, len(data), 2 * BLOCK)]
    assert store.most_at_once >= 6


def test_sources_that_evict_each_other_are_mapped_and_read_in_turns(store, tmp_path):
    store.objects |= {"/a.npy": npy(ROWS), "/b.npy": npy(ROWS[::-1])}
    options = feedline.Store(cache=tmp_path, cache_bytes=10 * BLOCK)  # one of them, and a part of the other
    sources = [feedline.open_source(f"{store.url}/{name}.npy", store=options) for name in "ab"]
    wrong, mapped = [], []

    def read(seed):
        random, out = np.random.default_rng(seed), np.empty((300, 3000), np.uint8)
        for turn in range(12):
            which, rows = (turn // 4 + seed) % 2, random.integers(0, 5000, 300)
            sources[which].read(rows, out)
            mapped.append(sources[which].will_read is None)
            if not (out == (ROWS, ROWS[::-1])[which][rows]).all():
                wrong.append((which, rows))

    for seeds in ([0], [1], range(4)):
        threads = [threading.Thread(target=read, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert not all(mapped)
    assert library() is None or any(mapped)


@pytest.mark.skipif(library() is None, reason="nothing of a store is mapped")
def test_a_truncated_segment_of_a_mapped_object_gives_no_zeros(store, tmp_path):
    """The last page of the rest is readable, and zero beyond its end."""
    store.objects["/x.npy"] = npy(ROWS)
    options = feedline.Store(cache=tmp_path, cache_bytes=64 << 20)  # eight segments of one block
    source, out = feedline.open_source(f"{store.url}/x.npy", store=options), np.empty((4, 3000), np.uint8)
    for number in range(8):
        for _ in range(3):
            source.read(np.arange(5000), np.empty_like(ROWS))
        assert source.will_read is None  # it is mapped
        end = min(number * BLOCK + 5000, 15_000_000)
        file = source._files[0]
        path = file.cache.path(file._segments[number])
        os.truncate(path, end - number * BLOCK)
        rows = np.arange(4) + max(0, end // 3000 - 2)
        source.read(rows, out)
        np.testing.assert_array_equal(out, ROWS[rows])


@pytest.mark.skipif(library() is None, reason="nothing of a store is mapped")
@pytest.mark.parametrize("change", ["truncated", "deleted"])
def test_what_is_complete_is_mapped_until_it_is_gone(store, options, change):
    store.objects["/x.npy"] = npy(ROWS)
    source, rows = feedline.open_source(f"{store.url}/x.npy", store=options), np.arange(0, 5000, 7)

    def mapped():
        return str(options.cache) in Path("/proc/self/maps").read_text()

    def read():
        out = np.empty((len(rows), 3000), np.uint8)
        source.read(rows, out)
        np.testing.assert_array_equal(out, ROWS[rows])

    read()
    assert source.will_read is not None
    store.requests.clear()
    read()
    assert (source.will_read, mapped(), store.requests) == (None, True, [])
    for path in options.cache.rglob("*"):
        if path.is_file():
            os.truncate(path, 0) if change == "truncated" else path.unlink()
    read()
    assert change == "deleted" or source.will_read is not None  # what is mapped stays readable for a while
    read()


def test_requests_are_counted(store, options):
    store.objects["/x.npy"] = npy(ROWS)
    before = fetcher().counts.requests
    feedline.open_source(f"{store.url}/x.npy", store=options)[0]
    assert fetcher().counts.requests - before == len(store.requests)


def test_rows_are_fetched_before_they_are_read(store, tmp_path):
    """The source is told which rows come next: the blocks of later batches are fetched while the first waits."""
    store.objects["/x.bin"] = bytes(64 * BLOCK)
    options = feedline.Store(cache=tmp_path, cache_bytes=1 << 30)
    row = np.dtype((np.uint8, BLOCK))
    source = feedline.open_source(f"{store.url}/x.bin", dtype=row, store=options)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    reading = feedline.Reading(threads=1, buffer=1)
    with feedline.Feed(source, 8, sharding, order=feedline.Order(seed=1), reading=reading, prefetch=1) as feed:
        feed.seek(0, 24)
        expected = feed.rows_of(feed.get_state())
        store.requests.clear()
        go_on = threading.Event()
        store.fault = lambda *request: (len(store.requests) >= 30 and go_on.set()) or (go_on.wait(20) and None)
        next(feed)
        assert store.most_at_once >= 30  # of five batches, before the first has come
    fetched = {block for start, stop in store.gets() for block in range(start // BLOCK, stop // BLOCK)}
    assert set(np.asarray(expected).tolist()) <= fetched


def test_arrays_in_a_store_and_on_local_disk_are_leaves_of_one_source(store, tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    store.objects["/x.npy"] = npy(ROWS)
    np.save(tmp_path / "label.npy", LABELS)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed({"x": f"{store.url}/x.npy", "label": tmp_path / "label.npy"}, 64, sharding) as feed:
        batch = next(feed)
        np.testing.assert_array_equal(batch["x"], ROWS[np.asarray(batch["label"])])


def test_ragged_rows_in_a_store(store, tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    lengths = np.random.default_rng(0).integers(0, 9, 2000)
    arrays = {"t": np.arange(lengths.sum()), "at": np.cumsum([0, *lengths]), "y": LABELS[:2000]}
    for name, array in arrays.items():
        store.objects[f"/{name}.npy"] = npy(array)
    url = {name: f"{store.url}/{name}.npy" for name in arrays}
    far = feedline.Ragged({"t": (url["t"], url["at"]), "y": url["y"]}, pad_to=(4, 8))
    near = feedline.Ragged({"t": (arrays["t"], arrays["at"]), "y": arrays["y"]}, pad_to=(4, 8))
    assert far.identity == near.identity
    rows, told = np.append(np.random.default_rng(1).permutation(2000)[:500], 1999), 0
    for _ in range(4):
        told += far.will_read is not None and far.will_read(rows, 0)
        assert far.padded_length(rows) == 8
        out, expected = (
            {name: np.empty((501, *leaf.shape), leaf.dtype) for name, leaf in near.spec.items()} for _ in range(2)
        )
        far.read(rows, out)
        near.read(rows, expected)
        jax.tree.map(np.testing.assert_array_equal, out, expected)
    assert told


def test_mixtures_of_arrays_in_stores_and_in_memory(store, options):
    store.objects["/x.npy"] = npy(LABELS)
    remote = feedline.open_source(f"{store.url}/x.npy", columns=["x"], store=options)
    mixed = [
        feedline.Mixture({"far": far, "near": {"x": -1 - LABELS}}, {"far": 2, "near": 1})
        for far in (remote, {"x": LABELS})
    ]
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    assert mixed[0].will_read is not None
    assert getattr(mixed[1], "will_read", None) is None
    with feedline.Feed(mixed[0], 64, sharding) as far, feedline.Feed(mixed[1], 64, sharding) as near:
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, next(far), next(near))


@pytest.mark.slow
def test_worker_processes_read_from_a_store(store, options):
    store.objects["/x.npy"] = npy(LABELS)
    source = feedline.open_source(f"{store.url}/x.npy", store=options)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed(source, 64, sharding, reading=feedline.Reading(workers=1)) as feed:
        for _ in range(3):
            rows = feed.rows_of(feed.get_state())
            np.testing.assert_array_equal(np.asarray(next(feed)), rows)
