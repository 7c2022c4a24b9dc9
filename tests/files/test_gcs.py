"""`gs://` and `az://`, against a server that answers what obstore asks of these stores."""

import numpy as np
import pytest
from test_arrays_in_stores import ROWS, npy

import feedline


@pytest.fixture
def parts(bucket):
    for i in range(3):
        bucket.objects[f"/corpus/train/part-{i}.npy"] = npy(ROWS[100 * i : 100 * i + 100])
    return bucket


def test_objects_and_globs(parts, options):
    one = feedline.open_source("gs://corpus/train/part-1.npy", store=options)
    np.testing.assert_array_equal(one[7], ROWS[107])
    assert all(path.startswith("/corpus/") for _, path, _ in parts.requests)
    source = feedline.open_source("gs://corpus/train/part-*.npy", store=options)
    assert len(source) == 300
    np.testing.assert_array_equal(source[250], ROWS[250])
    with pytest.raises(FileNotFoundError, match=r"there is no object gs://corpus/no\.npy"):
        feedline.open_source("gs://corpus/no.npy", store=options)
    with pytest.raises(FileNotFoundError, match=r"no object matches gs://corpus/train/\*\.npz"):
        feedline.open_source("gs://corpus/train/*.npz", store=options)


def test_changes_are_noticed(parts, options):
    source = feedline.open_source("gs://corpus/train/part-0.npy", store=options)
    parts.objects["/corpus/train/part-0.npy"] = npy(ROWS[1:101])
    with pytest.raises(feedline.FeedError, match="must not change"):
        source[50]


def test_objects_of_azure(bucket, options, monkeypatch):
    """`az://`, as far as the server answers it: objects and ranges, and no listings."""
    names = ("STORAGE_ACCOUNT_NAME", "STORAGE_ENDPOINT", "SKIP_SIGNATURE")
    for name, value in zip(names, ("ours", bucket.url, "true"), strict=True):
        monkeypatch.setenv(f"AZURE_{name}", value)
    bucket.objects["/corpus/x.npy"] = npy(ROWS)
    source = feedline.open_source("az://corpus/x.npy", store=options)
    np.testing.assert_array_equal(source[7], ROWS[7])
