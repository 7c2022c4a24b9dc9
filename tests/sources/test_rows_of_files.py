"""Arrays in a store, which are mapped while the cache has all of them, against the same files on local disk."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from rows_read import read_rows

import feedline
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.epoch import SingleOrder
from feedline._src.rows.source import whole_cuts

RECORDS = np.zeros(30, [("image", np.uint8, (4, 3)), ("label", ">i4")])
RECORDS["image"], RECORDS["label"] = np.arange(360).reshape(30, 4, 3) % 251, np.arange(30)
X = np.arange(90, dtype=np.float32).reshape(30, 3)
FORMS = {
    "one": ("0.npy", {}),
    "several": ("?.npy", {}),
    "members": ("?.npz", {}),
    "records": ("records.npy", {}),
    "raw records": ("records.bin", {"dtype": RECORDS.dtype, "columns": ["label"]}),
    "windows": ("[01].npy", {"window": 4, "stride": 3}),
}


@pytest.fixture
def folder(bucket, tmp_path):
    """Files of arrays, which the bucket "corpus" has, too."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", X + 100 * i)
        np.savez(tmp_path / f"{i}.npz", x=X + i, y=np.arange(30))
    np.save(tmp_path / "records.npy", RECORDS)
    np.save(tmp_path / "short.npy", X[:2])
    RECORDS.tofile(tmp_path / "records.bin")
    np.savez_compressed(tmp_path / "0-packed.npz", x=X, y=np.arange(30))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(X))
    for path in tmp_path.iterdir():
        bucket.objects[f"/corpus/{path.name}"] = path.read_bytes()
    return tmp_path


def read_some(source):
    return read_rows(source, np.random.default_rng(0).integers(0, len(source), 20))


def read_columns(source):
    """Some columns of each leaf, read into memory with gaps, and into memory of dtype float64."""
    rows, found = np.random.default_rng(1).integers(0, len(source), 20), []
    for number, leaf in enumerate(jax.tree.leaves(source.spec)):
        columns = tuple(slice(1, None) if axis == 0 else np.arange(n)[::2] for axis, n in enumerate(leaf.shape))
        shape = np.empty(leaf.shape, bool)[columns].shape
        for out in (np.zeros((20, *shape, 2), leaf.dtype)[..., 0], np.empty((20, *shape))):
            source.read_cuts(rows, [(number, columns, out)])
            found.append(out)
    return found


def read_positions(source):
    out = jax.tree.map(lambda leaf: np.empty((3, *leaf.shape), leaf.dtype), source.spec)
    order = SingleOrder(Order(seed=1), len(source))
    return source.read_ordered(order, 1, np.array([3, 9, 0]), whole_cuts(out)), out


@pytest.mark.parametrize("read", [read_some, read_columns, read_positions])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_local_files_whatever_the_cache_has(form, read, folder, options):
    pattern, more = FORMS[form]
    local = feedline.open_source(folder / pattern, **more)
    source = feedline.open_source(f"s3://corpus/{pattern}", store=options, **more)
    assert source.identity == local.identity
    cached, expected = [Path(file._pieces[0].path) for file in source._files], read(local)
    for lost, how in ((cached, os.unlink), ([], os.unlink), (cached[:1], os.unlink), (cached[-1:], truncate)):
        for path in lost:
            how(path)
        for _ in range(4):  # a read checks only a few of the files
            jax.tree.map(np.testing.assert_array_equal, read(source), expected)
            read_rows(source)
        assert (source.will_read is None) == (library() is not None)


def truncate(path):
    os.truncate(path, 0)


def test_a_file_in_a_store_that_is_shorter_than_a_window_has_no_rows(folder, options):
    local, source = (
        feedline.open_source(f"{place}/[0s]*.npy", window=4, store=store)
        for place, store in ((folder, None), ("s3://corpus", options))
    )
    assert (len(source), source.identity) == (7, local.identity)
    np.testing.assert_array_equal(read_rows(source), read_rows(local))


def test_arrays_in_a_store_without_one_range_of_bytes_a_row_are_refused(folder, options):
    for name, match in (
        ("0*.npz", r"compressed in all files or in none, and it is uncompressed in .*0\.npz; write"),
        ("fortran.npy", r"fortran\.npy is in Fortran order; write it again: np\.save"),
    ):
        with pytest.raises(ValueError, match=match):
            feedline.open_source(f"s3://corpus/{name}", store=options)


def test_a_mixture_joins_no_arrays_of_a_store(folder, options):
    near = {"x": np.zeros((5, 3), np.float32)}
    far = feedline.open_source("s3://corpus/0.npy", columns=["x"], store=options)
    for source, joined in (({"x": folder / "0.npy"}, True), (far, False)):
        mixture = feedline.Mixture({"far": source, "near": near}, {"far": 1, "near": 1})
        assert (mixture.arrays is not None) == joined
        np.testing.assert_array_equal(mixture[29]["x"], [87, 88, 89])
