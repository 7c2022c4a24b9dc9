"""The protocol of S3, against moto: listing, credentials, globs; and nothing secret in what is shown or saved."""

import pickle

import numpy as np
import obstore
import pytest
from obstore.store import S3Store
from test_arrays_in_stores import ROWS, npy

import feedline
from feedline._src.files.client import client_of

pytestmark = pytest.mark.slow

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
def bucket(endpoint, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client_of.cache_clear()
    import urllib.request

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
    client_of.cache_clear()


def test_globs_over_a_bucket(bucket, options):
    source = feedline.open_source("s3://corpus/train/part-*.npy", store=options)
    np.testing.assert_array_equal(source[250], ROWS[250])
    assert len(source) == 300
    assert len(feedline.open_source("s3://corpus/train/part-[!1].npy", store=options)) == 200
    deep = feedline.open_source("s3://corpus/**/part-?.npy", store=options)
    assert len(deep) == 350
    np.testing.assert_array_equal(deep[0], ROWS[900])  # train/deep comes before train/part
    with pytest.raises(FileNotFoundError, match=r"no object matches s3://corpus/train/\*.npz"):
        feedline.open_source("s3://corpus/train/*.npz", store=options)
    with pytest.raises(FileNotFoundError, match=r"there is no object s3://corpus/no\.npy"):
        feedline.open_source("s3://corpus/no.npy", store=options)
    for address in ("s3://absent/x.npy", "s3://absent/*.npy", "s3://absent/photos/"):
        with pytest.raises(FileNotFoundError, match="there is no bucket s3://absent; check its name"):
            feedline.open_source(address, store=options)


def test_credentials_are_nowhere(bucket, options, tmp_path, monkeypatch):
    source = feedline.open_source("s3://corpus/train/part-*.npy", store=options)
    shown = [repr(source), repr(source.identity), repr(client_of("s3://corpus")), repr(options)]
    shown.append(repr(pickle.dumps(source)))
    obstore.delete(bucket, "train/part-1.npy")
    with pytest.raises(feedline.FeedError) as caught:
        source.read(np.arange(300), np.empty((300, 3000), np.uint8))
    shown += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    for path in tmp_path.rglob("*"):
        shown.append(str(path))
    assert not any(SECRET in each or "AKIA" in each for each in shown)
