"""Parquet files in a store: the same rows and identities as of local files; groups are fetched ahead."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import feedline

X = np.random.default_rng(5).normal(size=(200_000, 8)).astype(np.float32)  # 6.4 MB
Y = np.arange(200_000)


def parquet():
    file = io.BytesIO()
    x = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 8)
    pq.write_table(pa.table({"y": Y, "x": x}), file, row_group_size=20_000, compression="zstd")
    return file.getvalue()


def test_only_the_footer_is_fetched_to_open_a_file(store, options):
    store.objects["/x.parquet"] = parquet()
    feedline.open_source(f"{store.url}/x.parquet", store=options)
    assert sum(stop - start for start, stop in store.gets()) < 300_000


def test_groups_are_fetched_before_they_are_read(store, options):
    store.objects["/x.parquet"] = parquet()
    source = feedline.open_source(f"{store.url}/x.parquet", store=options)
    store.requests.clear()
    assert source.will_read(np.array([0, 100_000]), 0)
    out = {"x": np.empty((2, 8), np.float32), "y": np.empty(2, np.int64)}
    source.read(np.array([0, 100_000]), out)
    assert out["y"].tolist() == [0, 100_000]
    assert 1 <= len([part for part in store.gets() if part[1] - part[0] > 1 << 20]) <= 3


TEXT = [f"document {i} " + "x" * (i % 300) for i in range(5000)]


def texts():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": TEXT, "n": np.arange(5000)}), file, row_group_size=500, compression="zstd")
    return file.getvalue()


def test_a_store_in_trouble_is_no_bad_row_of_bytes(store, tmp_path):
    store.objects["/x.parquet"] = texts()
    source = feedline.open_source(f"{store.url}/x.parquet", store=feedline.Store(cache=tmp_path, patience_s=0.2))
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2") as caught:
        source[4999]
    assert not isinstance(caught.value, feedline.RowError)
    store.fault = lambda *request: None
    assert source[4999]["n"] == 4999


def test_changes_and_troubles_are_no_bad_rows(store, tmp_path):
    store.objects["/x.parquet"] = parquet()
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    source = feedline.open_source(f"{store.url}/x.parquet", store=options)
    sent = pickle.dumps(source)
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2") as caught:
        source[199_999]
    assert not isinstance(caught.value, feedline.RowError)
    store.fault = lambda *request: None
    assert source[199_999]["y"] == 199_999
    store.objects["/x.parquet"] += b"x"
    with pytest.raises(feedline.FeedError, match="must not change") as caught:
        source[100_000]
    assert not isinstance(caught.value, feedline.RowError)
    with pytest.raises((feedline.FeedError, ValueError), match="must not change"):
        pickle.loads(sent)


def test_what_is_no_parquet(store, options):
    store.objects |= {"/x.parquet": b"<html>" * 100, "/y.parquet": parquet()[:-100], "/z.parquet": b""}
    for name in "xyz":
        with pytest.raises(ValueError, match=f"{name}.parquet cannot be read as a Parquet file"):
            feedline.open_source(f"{store.url}/{name}.parquet", store=options)
