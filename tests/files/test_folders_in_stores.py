"""Folders and globs of files in a store: the same rows and identities as of the local folder."""

import io
import pickle

import jax
import numpy as np
import PIL.Image
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.files.fetcher import fetcher

RANDOM = np.random.default_rng(0)
FILES = {
    f"{name}/{i:03}.jpg": RANDOM.bytes(int(size))
    for name in ("cat", "cat-big", "dog")  # "cat-big/" is listed before "cat/"
    for i, size in enumerate(RANDOM.integers(0, 20_000, 40))
} | {"dog/large.jpg": RANDOM.bytes(5 << 20)}


def put(store, files, folder="train"):
    for name, data in files.items():
        store.objects[f"/corpus/{folder}/{name}"] = data


def written(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_class_folders(scheme, bucket, options, tmp_path):
    put(bucket, FILES | {"cat/.hidden.jpg": b"", ".git/x": b"", "cat/": b"", "dog/": b"", "new/": b""})
    bucket.objects["/corpus/training/x.jpg"] = b"another folder"
    written(tmp_path / "train", FILES)
    (tmp_path / "train" / "new").mkdir()
    local = feedline.open_source(tmp_path / "train")
    remote = feedline.open_source(f"{scheme}://corpus/train/", store=options)
    assert [method for method, *_ in bucket.requests] == ["HEAD"] * 3 + ["GET"] * 2  # is it Zarr? files; classes
    assert (len(remote), remote.fields, remote.classes) == (
        121,
        ("file", "label"),
        ["cat", "cat-big", "dog", "new"],
    )
    assert remote.identity == local.identity
    rows = np.concatenate([RANDOM.integers(0, 121, 50), [120]])
    for source in (remote, pickle.loads(pickle.dumps(remote))):
        assert source.will_read(rows, 0)
        assert source.records(rows) == local.records(rows)
    assert remote.file_of(120) == f"{scheme}://corpus/train/dog/large.jpg"
    assert feedline.open_source(f"{scheme}://corpus/train", store=options).identity == local.identity


def test_a_glob(bucket, options, tmp_path):
    put(bucket, FILES)
    written(tmp_path, FILES)
    for pattern in ("cat*/0*.jpg", "**/*.jpg", "dog/00?.jpg"):
        local = feedline.open_source(tmp_path / pattern)
        remote = feedline.open_source(f"s3://corpus/train/{pattern}", store=options)
        assert (len(remote), remote.identity) == (len(local), local.identity)
        np.testing.assert_array_equal(remote[len(remote) - 1], local[len(local) - 1])


def test_each_file_is_fetched_once_and_many_at_a_time(bucket, options):
    files = {f"{i}.png": RANDOM.bytes(3000) for i in range(400)}
    put(bucket, files)
    source = feedline.open_source("s3://corpus/train/", store=options)
    bucket.latency_s = 0.2
    bucket.requests.clear()
    rows = np.arange(400)
    for start in range(0, 400, 100):
        source.will_read(rows[start : start + 100], start // 100)
    assert source.records(rows) == [files[name] for name in sorted(files)]
    assert source.records(rows[::-1].copy()) == [files[name] for name in sorted(files)][::-1]
    assert len(bucket.gets()) - fetcher().counts.hedged <= 400
    assert bucket.most_at_once > 16
    bucket.requests.clear()
    assert feedline.open_source("s3://corpus/train/", store=options).records(rows[:5])
    assert len(bucket.gets()) == 1  # the listing


def test_changes_and_troubles_are_no_bad_rows(bucket, tmp_path):
    put(bucket, FILES)
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    source = feedline.open_source("s3://corpus/train/", store=options)
    bucket.objects["/corpus/train/cat/003.jpg"] += b"x"
    del bucket.objects["/corpus/train/cat/004.jpg"]
    for row, found in ((3, "must not change"), (4, "it is not there any more")):
        with pytest.raises(feedline.FeedError, match=found) as caught:
            source[row]
        assert not isinstance(caught.value, feedline.RowError)
        assert caught.value.file == f"s3://corpus/train/cat/00{row}.jpg"
    bucket.fault = lambda *request: 503
    assert source.will_read(np.array([5]), 0)
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2"):
        source[5]
    bucket.fault = lambda *request: None
    assert source[5]["file"] == FILES["cat/005.jpg"]
    source.close()


def test_what_is_no_folder_of_rows(bucket, options, store):
    put(bucket, {"a/1.jpg": b"1", "a/b/2.jpg": b"2"}, "deep")
    put(bucket, {"1.jpg": b"1", "b/2.jpg": b"2"}, "mixed")
    put(bucket, {"1.parquet": b"1"}, "tables")
    for folder, error in {
        "deep": "and not deeper, and s3://corpus/deep/a has the folder b",
        "mixed": "and s3://corpus/mixed has 1.jpg beside the folder b",
        "none": "the folder s3://corpus/none has no files",
        "tables": r"open such files by a glob: open_source\('s3://corpus/tables/\*\.parquet'\)",
    }.items():
        with pytest.raises(ValueError, match=error):
            feedline.open_source(f"s3://corpus/{folder}/", store=options)
    with pytest.raises(ValueError, match="a web server does not list its files, so a folder must lie in s3://"):
        feedline.open_source(f"{store.url}/train/", store=options)


def test_a_feed_decodes_images(bucket, options):
    for i in range(24):
        file = io.BytesIO()
        PIL.Image.fromarray(np.full((9, 8, 3), 10 * i, np.uint8)).save(file, "png")
        put(bucket, {f"{'ab'[i % 2]}/{i:02}.png": file.getvalue()})
    source = feedline.images.decode(feedline.open_source("s3://corpus/train/", store=options), size=8)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed(source, 8, sharding, epochs=1) as feed:
        batches = [jax.device_get(batch) for batch in feed]
    assert len(batches) == 3
    assert sorted(int(image.mean()) for b in batches for image in b["image"]) == [10 * i for i in range(24)]
    assert all((b["image"].mean(axis=(1, 2, 3)) // 10 % 2 == b["label"]).all() for b in batches)
