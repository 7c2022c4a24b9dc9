"""Zarr arrays and groups in a store: the same rows and identities as of local folders."""

import json
import pickle
import time

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.stores.fetcher import fetcher

X = np.random.default_rng(5).integers(1, 255, (200, 30, 20), np.uint8)
Y = np.arange(1, 201)
CHUNKS, ROW_CHUNKS = (16, 16, 20), -(-200 // 16) * 2  # 13 rows of two chunks
SHARDS = {
    "codecs": [{
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(CHUNKS),
            "codecs": [{"name": "bytes"}, {"name": "zstd"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
    }]
}  # fmt: skip
FORMS = {
    "v2": ("zarr", CHUNKS, {"compressor": {"id": "zlib", "level": 1}}),
    "v2 with slashes": ("zarr", CHUNKS, {"dimension_separator": "/"}),
    "v3": ("zarr3", CHUNKS, {"codecs": [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]}),
    "v3 with dots": ("zarr3", CHUNKS, {"chunk_key_encoding": {"name": "v2"}}),
    "shards": ("zarr3", (64, 32, 40), SHARDS),
    "shards, index first": (
        "zarr3", (64, 32, 40),
        {"codecs": [{**SHARDS["codecs"][0], "configuration": {
            **SHARDS["codecs"][0]["configuration"], "index_location": "start"}}]},
    ),
}  # fmt: skip


def write(path, array, driver="zarr3", chunks=(16,), metadata=None, rows=slice(None), fill=None):
    store = ts.open(
        {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata or {}},
        create=True, dtype=array.dtype, shape=array.shape, chunk_layout=ts.ChunkLayout(write_chunk_shape=chunks),
        fill_value=fill,
    ).result()  # fmt: skip
    store[rows].write(array[rows]).result()


def group(path, **members):
    """A group of version 3, with consolidated metadata."""
    path.mkdir()
    for name, arguments in members.items():
        write(path / name, *arguments)
    metadata = {name: json.loads((path / name / "zarr.json").read_text()) for name in members}
    found = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": {"metadata": metadata}}
    (path / "zarr.json").write_text(json.dumps(found))


def put(store, folder, at=""):
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"{at}/{path.relative_to(folder.parent)}"] = path.read_bytes()


def columns(source, rows):
    out = jax.tree.map(lambda leaf: np.empty((len(rows), *leaf.shape), leaf.dtype), source.spec)
    source.read(rows, out)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_identity_are_those_of_the_local_folder(form, store, options, tmp_path):
    driver, chunks, metadata = FORMS[form]
    write(tmp_path / "x.zarr", X, driver, chunks, metadata)
    put(store, tmp_path / "x.zarr")
    local = feedline.open_source(tmp_path / "x.zarr")
    remote = feedline.open_source(f"{store.url}/x.zarr", store=options)
    assert (len(remote), remote.identity) == (200, local.identity)
    rows = np.random.default_rng(6).permutation(200)[:90]
    for source in (remote, pickle.loads(pickle.dumps(remote))):
        assert source.will_read(rows, 0)
        np.testing.assert_array_equal(columns(source, rows), X[rows])
    gets = [request for request in store.requests if request[0] == "GET"]
    assert len(gets) - fetcher().counts.hedged <= len(set(gets))  # nothing twice, by sources that share a cache


@pytest.mark.parametrize("place", ["s3://corpus", "web"])
def test_groups(place, bucket, options, tmp_path):
    group(tmp_path / "g.zarr", x=(X, "zarr3", CHUNKS), y=(Y,))
    put(bucket, tmp_path / "g.zarr", "/corpus")
    address = f"{bucket.url}/corpus" if place == "web" else place
    local = feedline.open_source(tmp_path / "g.zarr")
    for end in ("g.zarr", "g.zarr/"):
        remote = feedline.open_source(f"{address}/{end}", store=options)
        assert remote.identity == local.identity
        found = columns(remote, np.array([199, 0]))
        np.testing.assert_array_equal(found["x"], X[[199, 0]])
        assert found["y"].tolist() == [200, 1]
    one = feedline.open_source(f"{address}/g.zarr/y", store=options)  # an address without a suffix
    assert int(one[7]) == 8
    assert sorted(feedline.open_source(f"{address}/g.zarr", columns=["y"], store=options).spec) == ["y"]
    bucket.objects["/corpus/g.zarr/zarr.json"] = b'{"zarr_format": 3, "node_type": "group"}'
    if place == "web":
        with pytest.raises(ValueError, match="the metadata of a Zarr group must be consolidated"):
            feedline.open_source(f"{address}/g.zarr", store=options)


def test_a_glob(bucket, options, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.zarr", Y)
        put(bucket, tmp_path / f"{name}.zarr", "/corpus/deep")
    source = feedline.open_source("s3://corpus/deep/*.zarr", store=options)
    assert source.identity == feedline.open_source(tmp_path / "*.zarr").identity
    assert columns(source, np.array([0, 399])).tolist() == [1, 200]


def test_chunks_are_fetched_ahead_once_and_together(store, options, tmp_path):
    write(tmp_path / "x.zarr", X, "zarr3", CHUNKS)
    put(store, tmp_path / "x.zarr")
    source = feedline.open_source(f"{store.url}/x.zarr", store=options)
    store.latency_s = 0.3
    store.requests.clear()
    assert source.will_read(np.arange(200), 0)
    np.testing.assert_array_equal(columns(source, np.arange(200)), X)
    assert len(store.gets()) - fetcher().counts.hedged <= ROW_CHUNKS
    assert store.most_at_once >= 16
    cached = fetcher().counts.cached
    assert source.will_read(np.arange(200), 0)
    time.sleep(0.2)
    assert fetcher().counts.cached == cached  # nor are they read from the cache a second time
    source.close()


@pytest.mark.parametrize("form", ["v2", "v3", "shards"])
def test_a_missing_chunk_is_a_bad_row_or_has_the_fill_value(form, store, options, tmp_path):
    driver, chunks, metadata = FORMS[form]
    write(tmp_path / "x.zarr", X, driver, chunks, metadata, rows=slice(0, 128), fill=7)
    put(store, tmp_path / "x.zarr")
    source = feedline.open_source(f"{store.url}/x.zarr", store=options)
    np.testing.assert_array_equal(source[127], X[127])
    with pytest.raises(feedline.RowError, match=r"every chunk must be there, and .* is not.*missing_chunks="):
        source[199]
    filled = feedline.open_source(f"{store.url}/x.zarr", missing_chunks="fill", store=options)
    assert filled.identity == feedline.open_source(tmp_path / "x.zarr", missing_chunks="fill").identity
    assert (filled[199] == 7).all()
    np.testing.assert_array_equal(filled[127], X[127])


@pytest.mark.parametrize("fault", [403, 503, "gone"])
def test_trouble_of_the_store_is_no_missing_chunk(fault, store, tmp_path):
    write(tmp_path / "x.zarr", Y, fill=7)
    put(store, tmp_path / "x.zarr")
    options = feedline.Store(cache=tmp_path / "cache", patience_s=0.2)
    source = feedline.open_source(f"{store.url}/x.zarr", missing_chunks="fill", store=options)
    if fault == "gone":
        objects = dict(store.objects)
        store.objects.clear()
    else:
        store.fault = lambda *request: fault
    with pytest.raises(feedline.FeedError) as caught:
        source[100]
    assert not isinstance(caught.value, feedline.RowError)
    if fault == "gone":
        store.objects |= objects
    store.fault = lambda *request: None
    assert int(source[100]) == 101


def test_changes(store, options, tmp_path):
    write(tmp_path / "x.zarr", Y)
    put(store, tmp_path / "x.zarr")
    source = feedline.open_source(f"{store.url}/x.zarr", store=options)
    assert source.identity
    sent = pickle.dumps(source)
    chunk = store.objects["/x.zarr/c/0"]
    store.objects["/x.zarr/c/0"] = store.objects["/x.zarr/c/1"]
    with pytest.raises(feedline.FeedError, match="rows sampled when the feed was built differ now"):
        pickle.loads(sent)
    store.objects["/x.zarr/c/0"] = chunk
    store.objects["/x.zarr/zarr.json"] += b" "
    with pytest.raises(feedline.FeedError, match="must not change"):
        pickle.loads(sent)


def test_a_chunk_that_is_replaced_after_it_was_seen(store, tmp_path):
    write(tmp_path / "x.zarr", Y)
    put(store, tmp_path / "x.zarr")
    options = feedline.Store(cache=tmp_path / "cache")
    source = feedline.open_source(f"{store.url}/x.zarr", cache_bytes=0, store=options)
    assert [int(source[3]), int(source[100])] == [4, 101]  # the second group takes the place of the first
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    store.objects["/x.zarr/c/0"] = store.objects["/x.zarr/c/1"]
    with pytest.raises(feedline.FeedError, match="must not change"):
        source[3]


def test_damage(store, options, tmp_path):
    driver, chunks, metadata = FORMS["shards"]
    write(tmp_path / "x.zarr", X, driver, chunks, metadata)
    put(store, tmp_path / "x.zarr")
    shard = store.objects["/x.zarr/c/0/0/0"]
    for data in (shard[:-5], shard[:-1] + bytes([shard[-1] ^ 1]), b"\0" * 50 + shard[50:], b""):
        store.objects["/x.zarr/c/0/0/0"] = data
        source = feedline.open_source(f"{store.url}/x.zarr", store=options)
        with pytest.raises(feedline.RowError, match="could not be read"):
            source[0]
        np.testing.assert_array_equal(source[199], X[199])
    for data in (b"{", b"[]", b'{"zarr_format": 3, "node_type": "array"}'):
        store.objects["/x.zarr/zarr.json"] = data
        with pytest.raises(ValueError, match=r"x\.zarr.* cannot be read as"):
            feedline.open_source(f"{store.url}/x.zarr", store=options)
    with pytest.raises(FileNotFoundError, match="is no Zarr array or group"):
        feedline.open_source(f"{store.url}/none.zarr", store=options)


def test_a_feed(store, options, tmp_path):
    group(tmp_path / "g.zarr", x=(X, "zarr3", CHUNKS), y=(Y,))
    put(store, tmp_path / "g.zarr")
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    source = feedline.open_source(f"{store.url}/g.zarr", store=options)
    with feedline.Feed(source, 40, sharding, epochs=1) as feed:
        for batch in feed:
            rows = np.asarray(batch["y"]) - 1
            np.testing.assert_array_equal(np.asarray(batch["x"]), X[rows])
