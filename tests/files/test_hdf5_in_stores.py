"""HDF5 files in a store: the same rows and identities as of local files, since they are fetched whole."""

import io
import pickle

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

COUNT = 12_000
X = np.random.default_rng(5).integers(0, 255, (COUNT, 16, 64), np.uint8)  # 12 MB
JPEGS = [np.random.default_rng(i).bytes(i % 700) for i in range(3000)]


def hdf5(**datasets):
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        for name, given in datasets.items():
            opened.create_dataset(name, **given)
    return file.getvalue()


def with_values():
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        values = opened.create_dataset("jpeg", (3000,), h5py.vlen_dtype(np.uint8), chunks=(500,))
        values[:] = np.array([np.frombuffer(jpeg, np.uint8) for jpeg in JPEGS], object)
        opened["label"] = np.arange(3000)
    return file.getvalue()


LAYOUTS = {
    "contiguous": {},
    "chunks of whole rows": {"chunks": (500, 16, 64)},
    "chunks of parts of rows": {"chunks": (500, 8, 32)},
    "gzip": {"chunks": (500, 16, 32), "compression": "gzip", "shuffle": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_identity_are_those_of_the_local_file(layout, as_local):
    as_local("x.h5", hdf5(x={"data": X, **LAYOUTS[layout]}, y={"data": np.arange(COUNT)}))


def test_values_of_any_length(as_local):
    remote = as_local("x.h5", with_values())
    assert remote[7]["jpeg"] == JPEGS[7]


def test_rows_that_were_never_written(store, options):
    store.objects["/x.h5"] = hdf5(x={"shape": (9, 4), "dtype": "f4", "fillvalue": 2.5}, y={"data": np.arange(9)})
    source = feedline.open_source(f"{store.url}/x.h5", store=options)
    assert jax.tree.map(lambda leaf: leaf.tolist(), source[8]) == {"x": [2.5] * 4, "y": 8}


def test_changes_and_troubles_are_no_bad_rows(store, tmp_path):
    store.objects["/x.h5"] = hdf5(x={"data": X, **LAYOUTS["chunks of parts of rows"]})
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    store.fault = lambda method, *request: 503 if method == "GET" else None
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2"):  # and not "damaged"
        feedline.open_source(f"{store.url}/x.h5", store=options)
    store.fault = lambda *request: None
    source = feedline.open_source(f"{store.url}/x.h5", store=options)
    packed = pickle.dumps(source)
    store.objects["/x.h5"] += b"x"
    for ask in (lambda: source[COUNT // 2], lambda: pickle.loads(packed)):
        with pytest.raises(feedline.FeedError, match="must not change") as caught:
            ask()
        assert not isinstance(caught.value, feedline.RowError)


def test_what_is_no_hdf5(store, options):
    store.objects |= {"/page.h5": b"<html>" * 100, "/cut.h5": hdf5(x={"data": X})[:-100], "/empty.h5": b""}
    for name in ("page", "cut", "empty"):
        with pytest.raises(ValueError, match=rf"{name}\.h5 cannot be read as an HDF5 file: .*write it again"):
            feedline.open_source(f"{store.url}/{name}.h5", store=options)


def test_a_feed_decodes_values(store, options):
    store.objects["/x.h5"] = with_values()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def decode(record, out, row):
        out["size"][...] = len(record["jpeg"])
        out["label"][...] = record["label"]

    spec = {name: jax.ShapeDtypeStruct((), np.int32) for name in ("size", "label")}
    source = feedline.decoded(feedline.open_source(f"{store.url}/x.h5", store=options), decode, spec)
    with feedline.Feed(source, batch_size=256, sharding=sharding, epochs=1) as feed:
        found = [(int(size), int(label)) for b in feed for size, label in zip(b["size"], b["label"], strict=True)]
    assert len({label for _, label in found}) == len(found) == 2816  # whole batches
    assert all(size == label % 700 for size, label in found)
