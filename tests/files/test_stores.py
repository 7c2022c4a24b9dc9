"""Sources in a store: the same rows, identities and batches as from local files; what is fetched, and when."""

import io
import os
import pickle
import threading
import urllib.request

import jax
import numpy as np
import obstore
import PIL.Image
import pytest
from background import arrived, at_once
from obstore.store import S3Store
from rows_read import read_rows, same
from stored import BLOCK, LABELS, ROWS, npy
from test_docs import run

import feedline
from feedline._src.files.client import client_of, clients
from feedline._src.native.library import library


def test_a_feed_gives_the_batches_of_the_local_files(store, tmp_path, monkeypatch, sharding):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    for name, array in (("x", ROWS), ("label", LABELS)):
        np.save(tmp_path / f"{name}.npy", array)
        store.objects[f"/{name}.npy"] = npy(array)

    def feed(place):
        return feedline.Feed({"x": f"{place}/x.npy", "label": f"{place}/label.npy"}, 64, sharding, epochs=1)

    with feed(tmp_path) as local, feed(store.url) as remote:
        for _ in range(10):
            jax.tree.map(np.testing.assert_array_equal, next(remote), next(local))
        state = remote.get_state()
        requests = len(store.requests)  # more may follow
        asked = remote.statistics()
    assert asked.stores["requests"] >= requests > 0
    assert asked.stores["fetched_bytes"] > ROWS.nbytes // 2
    assert asked.stores["wait_s"] > 0
    assert "fetched_bytes" in str(asked)
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
    six = threading.Event()
    store.fault = lambda *request: (store.most_at_once >= 6 and six.set()) or (arrived(six) and None)
    store.requests.clear()
    at_once(read_rows, [source] * 3)
    assert sorted(store.gets()) == [(start, start + 2 * BLOCK) for start in range(0, len(data), 2 * BLOCK)]
    assert store.most_at_once >= 6


def test_sources_that_evict_each_other_are_mapped_and_read_in_turns(store, tmp_path):
    store.objects |= {"/a.npy": npy(ROWS), "/b.npy": npy(ROWS[::-1])}
    options = feedline.Store(cache=tmp_path, cache_bytes=10 * BLOCK)  # for one object and a part of the other
    sources = [feedline.open_source(f"{store.url}/{name}.npy", store=options) for name in "ab"]
    mapped = []

    def read(seed):
        random, out = np.random.default_rng(seed), np.empty((300, 3000), np.uint8)
        for turn in range(12):
            which, rows = (turn // 4 + seed) % 2, random.integers(0, 5000, 300)
            sources[which].read(rows, out)
            mapped.append(sources[which].will_read is None)
            np.testing.assert_array_equal(out, (ROWS, ROWS[::-1])[which][rows])

    for seeds in ([0], [1], range(4)):
        at_once(read, seeds)
    assert not all(mapped)
    assert library() is None or any(mapped)


@pytest.mark.skipif(library() is None, reason="nothing of a store is mapped")
def test_a_truncated_piece_of_a_mapped_object_gives_no_zeros(store, tmp_path):
    """The last page of a truncated file stays readable, with zeros behind the end of the file."""
    store.objects["/x.npy"] = npy(ROWS)
    options = feedline.Store(cache=tmp_path, cache_bytes=64 << 20)  # eight pieces of one block
    source, out = feedline.open_source(f"{store.url}/x.npy", store=options), np.empty((4, 3000), np.uint8)
    for number in range(8):
        for _ in range(3):
            source.read(np.arange(5000), np.empty_like(ROWS))
        assert source.will_read is None  # it is mapped
        end = min(number * BLOCK + 5000, 15_000_000)
        os.truncate(source._files[0]._pieces[number].path, end - number * BLOCK)
        rows = np.arange(4) + max(0, end // 3000 - 2)
        source.read(rows, out)
        np.testing.assert_array_equal(out, ROWS[rows])


def test_rows_are_fetched_before_they_are_read(store, tmp_path, sharding):
    """The source is told which rows come next: the blocks of later batches are fetched while the first waits."""
    store.objects["/x.bin"] = bytes(64 * BLOCK)
    options = feedline.Store(cache=tmp_path, cache_bytes=1 << 30)
    row = np.dtype((np.uint8, BLOCK))
    source = feedline.open_source(f"{store.url}/x.bin", dtype=row, store=options)
    reading = feedline.Reading(threads=1, buffer=1)
    with feedline.Feed(source, 8, sharding, order=feedline.Order(seed=1), reading=reading, prefetch=1) as feed:
        feed.seek(0, 24)
        expected = feed.rows_of(feed.get_state())
        store.requests.clear()
        go_on = threading.Event()
        store.fault = lambda *request: (store.most_at_once >= 30 and go_on.set()) or (arrived(go_on) and None)
        next(feed)
        assert store.most_at_once >= 30  # of several batches, before the first one comes
    fetched = {block for start, stop in store.gets() for block in range(start // BLOCK, stop // BLOCK)}
    assert set(np.asarray(expected).tolist()) <= fetched


def test_arrays_in_a_store_and_on_local_disk_are_leaves_of_one_source(store, tmp_path, monkeypatch, sharding):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    store.objects["/x.npy"] = npy(ROWS)
    np.save(tmp_path / "label.npy", LABELS)
    with feedline.Feed({"x": f"{store.url}/x.npy", "label": tmp_path / "label.npy"}, 64, sharding) as feed:
        batch = next(feed)
        np.testing.assert_array_equal(batch["x"], ROWS[np.asarray(batch["label"])])


def test_ragged_rows_in_a_store(store, tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    lengths = np.random.default_rng(0).integers(0, 9, 2000)
    arrays = {"t": np.arange(lengths.sum()), "at": np.cumsum([0, *lengths])}
    store.objects |= {f"/{name}.npy": npy(array) for name, array in arrays.items()}
    far = feedline.Ragged({"t": (f"{store.url}/t.npy", f"{store.url}/at.npy")}, pad_to=(4, 8))
    near = feedline.Ragged({"t": (arrays["t"], arrays["at"])}, pad_to=(4, 8))
    assert far.identity == near.identity
    rows = np.append(np.random.default_rng(1).permutation(2000)[:500], 1999)
    assert far.will_read(rows, 0)
    for _ in range(4):
        assert far.padded_length(rows) == 8
        same(read_rows(far, rows), read_rows(near, rows))


# --- protocols ---


@pytest.fixture
def parts(bucket):
    for i in range(3):
        bucket.objects[f"/corpus/train/part-{i}.npy"] = npy(ROWS[100 * i : 100 * i + 100])
    return bucket


def test_objects_and_globs(parts, options):
    one = feedline.open_source("gs://corpus/train/part-1.npy", store=options)
    np.testing.assert_array_equal(one[7], ROWS[107])
    assert all(path.startswith("/corpus/") for _, path, _ in parts.requests)
    parts.objects["/corpus/a b%.npy"] = npy(ROWS)
    for address in ("gs://corpus/a b%.npy", f"{parts.url}/corpus/a b%.npy", f"{parts.url}/corpus/a%20b%25.npy"):
        assert len(feedline.open_source(address, store=options)) == len(ROWS)  # %20: copied from a browser
    source = feedline.open_source("gs://corpus/train/part-*.npy", store=options)
    assert len(source) == 300
    np.testing.assert_array_equal(source[250], ROWS[250])
    with pytest.raises(FileNotFoundError, match=r"there is no object gs://corpus/no\.npy"):
        feedline.open_source("gs://corpus/no.npy", store=options)
    with pytest.raises(FileNotFoundError, match=r"no object matches gs://corpus/train/\*\.npz"):
        feedline.open_source("gs://corpus/train/*.npz", store=options)
    parts.objects["/corpus/train//part-3.npy"] = b""
    with pytest.raises(feedline.FeedError, match="must list no key with an empty part"):  # without retries
        feedline.open_source("gs://corpus/train/part-*.npy", store=feedline.Store(cache=options.cache))


def test_objects_of_azure(bucket, options, monkeypatch):
    """`az://`, as far as the test server supports it: objects and ranges, but no listings."""
    names = ("STORAGE_ACCOUNT_NAME", "STORAGE_ENDPOINT", "SKIP_SIGNATURE")
    for name, value in zip(names, ("ours", bucket.url, "true"), strict=True):
        monkeypatch.setenv(f"AZURE_{name}", value)
    bucket.objects["/corpus/x.npy"] = npy(ROWS)
    source = feedline.open_source("az://corpus/x.npy", store=options)
    np.testing.assert_array_equal(source[7], ROWS[7])


SECRET = "not-to-be-seen"


@pytest.fixture(scope="module")
def endpoint():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture
def amazon(endpoint, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    clients.clear()
    request = urllib.request.Request(f"{endpoint}/corpus", method="PUT")
    request.add_header(
        "Authorization", "AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/20300101/us-east-1/s3/aws4_request"
    )
    urllib.request.urlopen(request).close()
    store = S3Store("corpus", client_options={"allow_http": True})
    for i in range(3):
        obstore.put(store, f"train/part-{i}.npy", npy(ROWS[100 * i : 100 * i + 100]))
    obstore.put(store, "train/deep/part-9.npy", npy(ROWS[900:950]))
    obstore.put(store, "train/README.txt", b"text")
    yield store
    clients.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("amazon")
def test_globs_over_a_bucket(options):
    source = feedline.open_source("s3://corpus/train/part-*.npy", store=options)
    np.testing.assert_array_equal(source[250], ROWS[250])
    assert len(source) == 300
    assert len(feedline.open_source("s3://corpus/train/part-[!1].npy", store=options)) == 200
    deep = feedline.open_source("s3://corpus/**/part-?.npy", store=options)
    assert len(deep) == 350
    np.testing.assert_array_equal(deep[0], ROWS[900])  # train/deep comes before train/part
    for address in ("s3://absent/x.npy", "s3://absent/*.npy", "s3://absent/photos/"):
        with pytest.raises(FileNotFoundError, match=r"there is no (bucket|object) s3://absent.*; check"):
            feedline.open_source(address, store=options)


@pytest.mark.slow
def test_credentials_are_nowhere(amazon, options, tmp_path, monkeypatch):
    source = feedline.open_source("s3://corpus/train/part-*.npy", store=options)
    shown = [
        repr(source),
        repr(source.identity),
        repr(client_of("s3://corpus", options.patience_s)),
        repr(options),
    ]
    shown.append(repr(pickle.dumps(source)))
    obstore.delete(amazon, "train/part-1.npy")
    with pytest.raises(feedline.FeedError) as caught:
        source.read(np.arange(300), np.empty((300, 3000), np.uint8))
    shown += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    for path in tmp_path.rglob("*"):
        shown.append(str(path))
    assert not any(SECRET in each or "AKIA" in each for each in shown)


def test_stores(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "other"))
    bucket.objects = {
        "/image.npy": npy(np.zeros((200, 4, 4), np.uint8)),
        "/label.npy": npy(np.arange(200, dtype=np.int32) % 10),
        "/tokens.bin": np.arange(1000, dtype=np.uint16).tobytes(),
    }
    for i in range(70):
        image = io.BytesIO()
        PIL.Image.fromarray(np.full((40, 50, 3), i, np.uint8)).save(image, "jpeg")
        bucket.objects[f"/photos/{'ab'[i % 2]}/{i}.jpg"] = image.getvalue()
    bucket.objects = {f"/my-bucket{path}": data for path, data in bucket.objects.items()}
    names = run("docs/stores.md", bucket="s3://my-bucket")
    assert "my-bucket" not in str(names["saved"])
    step, tokens, windows, images, counts = capsys.readouterr().out.splitlines()
    assert (step, tokens, windows) == ("20", "30 (33,)", "(8, 33)")
    assert images == "(64, 32, 32, 3) (64,)"
    assert int(counts.split()[0]) > 4
