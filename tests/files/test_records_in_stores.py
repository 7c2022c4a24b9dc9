"""Records of bytes in a store: the same as from local files."""

import io
import pickle
import tarfile

import numpy as np
import pytest
import store_server

import feedline
from feedline._src.rows import digests

RANDOM = np.random.default_rng(3)
RECORDS = [RANDOM.bytes(int(length)) for length in RANDOM.integers(0, 60_000, 200)]  # 6 MB: 3 blocks


def tar(records):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, record in enumerate(records):
            for name, data in ((f"{i:04}.bin", record), (f"{i:04}.txt", str(i).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def tfrecord(records):
    import google_crc32c

    def checksum(data):
        crc = google_crc32c.value(data)
        return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")

    lengths = [len(record).to_bytes(8, "little") for record in records]
    return b"".join(
        length + checksum(length) + record + checksum(record)
        for length, record in zip(lengths, records, strict=True)
    )


@pytest.mark.parametrize(("write", "suffix"), [(tar, "tar"), (tfrecord, "tfrecord")])
def test_records_and_identity_are_those_of_the_local_file(write, suffix, as_local, store, options):
    remote = as_local(f"x.{suffix}", write(RECORDS))
    rows = RANDOM.integers(0, 200, 50)
    expected = remote.records(rows)
    store.requests.clear()
    again = feedline.open_source(f"{store.url}/x.{suffix}", store=options)
    assert again.records(rows) == expected
    assert store.gets() == []  # the index, too, is in the cache
    store.objects[f"/x.{suffix}"] = write(RECORDS[::-1])
    changed = feedline.open_source(f"{store.url}/x.{suffix}", store=options)
    data = (lambda record: record) if suffix == "tfrecord" else (lambda record: record["bin"])
    assert list(map(data, changed.records(199 - rows))) == list(map(data, expected))
    with pytest.raises(feedline.FeedError, match="its ETag is"):
        pickle.loads(pickle.dumps(remote))


def test_an_object_of_the_same_tag_is_not_read_by_an_old_index(store, tmp_path, monkeypatch):
    monkeypatch.setattr(store_server, "etag", lambda data: '"the tag of all versions"')
    monkeypatch.setattr(digests, "of_samples", lambda size, samples: [size, "samples that miss the change"])
    store.objects["/x.tar"] = tar(RECORDS)
    options = feedline.Store(cache=tmp_path, patience_s=10)
    expected = feedline.open_source(f"{store.url}/x.tar", store=options).records(np.arange(200))
    moved = [*RECORDS[:99], RECORDS[99][:-2048], RECORDS[100] + bytes(2048), *RECORDS[101:]]
    store.objects["/x.tar"] = tar(moved)
    assert len(tar(moved)) == len(tar(RECORDS))
    for path in (tmp_path / "blocks").rglob("*"):
        if path.is_file():
            path.unlink()
    again = feedline.open_source(f"{store.url}/x.tar", store=options)
    assert again[150] == expected[150]
    with pytest.raises(feedline.FeedError, match=r"built again with the same size.*Delete that index") as error:
        again[100]
    assert error.value.file == f"{store.url}/x.tar"


def test_damage_is_a_bad_row_and_a_store_in_trouble_is_not(store, tmp_path):
    data = bytearray(tfrecord(RECORDS))
    data[-5] ^= 1
    store.objects["/x.tfrecord"] = bytes(data)
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    source = feedline.open_source(f"{store.url}/x.tfrecord", store=options)
    with pytest.raises(feedline.RowError, match="record 199 its data has another checksum"):
        source[199]
    for path in (tmp_path / "blocks").rglob("*"):
        if path.is_file():
            path.unlink()
    source.close()
    source = pickle.loads(pickle.dumps(source))
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2") as caught:
        source[0]
    assert not isinstance(caught.value, feedline.RowError)
