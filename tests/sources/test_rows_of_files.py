"""Arrays in files that are mapped only while a cache has all of them, against the same files on local disk."""

import os
import shutil

import jax
import numpy as np
import pytest

import feedline
from feedline._src.files.file import File
from feedline._src.files.files import Files
from feedline._src.formats.open_options import OpenOptions
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.epoch import SingleOrder
from feedline._src.rows.source import whole_cuts
from feedline._src.sources.arrays import ArraySource

needs_library = pytest.mark.skipif(library() is None, reason="without the C library nothing of a store is mapped")


class Cached(File):
    """A local file that is mapped only while it is complete; the mapping is that of a copy."""

    complete = False
    reads = 0

    def __init__(self, name):
        super().__init__(name)
        self.mapped = []

    def memory(self):
        if not self.complete:
            return None
        if not self.mapped:
            shutil.copy(self.name, f"{self.name}.cached")
            self.mapped.append(File(f"{self.name}.cached").memory())
        return self.mapped[0]

    def read_rows(self, offsets, out):
        self.reads += 1
        super().read_rows(offsets, out)


class CachedFiles(Files):
    in_store = True

    def __init__(self, paths):
        super().__init__(paths)
        self._files = [Cached(path) for path in paths]


RECORDS = np.zeros(30, [("image", np.uint8, (4, 3)), ("label", ">i4")])
RECORDS["image"], RECORDS["label"] = np.arange(360).reshape(30, 4, 3) % 251, np.arange(30)


def arrays_of(folder):
    """Paths of files with 30 rows each, by the form that they have."""
    x = np.arange(90, dtype=np.float32).reshape(30, 3)
    for i in range(3):
        np.save(folder / f"{i}.npy", x + 100 * i)
        np.savez(folder / f"{i}.npz", x=x + i, y=np.arange(30))
    np.savez_compressed(folder / "packed.npz", x=x, y=np.arange(30))
    np.save(folder / "records.npy", RECORDS)
    RECORDS.tofile(folder / "records.bin")
    files = {
        "one": (["0.npy"], {}),
        "several": ([f"{i}.npy" for i in range(3)], {}),
        "members": (["0.npz", "1.npz"], {}),
        "records": (["records.npy"], {}),
        "raw records": (["records.bin"], {"dtype": RECORDS.dtype, "columns": ["label"]}),
        "windows": (["0.npy", "1.npy"], {"window": 4, "stride": 3}),
    }
    return {form: ([str(folder / name) for name in names], more) for form, (names, more) in files.items()}


def opened(paths, **options):
    return ArraySource(paths, OpenOptions(**options), files=CachedFiles(paths))


def complete(source, *numbers):
    for number, file in enumerate(source._files):
        file.complete = number in numbers


def reads_of(source):
    reads = sum(file.reads for file in source._files)
    for file in source._files:
        file.reads = 0
    return reads


def check(source, local):
    """Every way to read."""
    rows = np.random.default_rng(0).integers(0, len(local), 20)
    out, expected = (
        jax.tree.map(lambda leaf: np.empty((20, *leaf.shape), leaf.dtype), local.spec) for _ in range(2)
    )
    source.read(rows, out)
    local.read(rows, expected)
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    for leaf, whole in enumerate(jax.tree.leaves(expected)):
        columns = tuple(
            slice(1, None) if axis == 0 else np.arange(n)[::2] for axis, n in enumerate(whole.shape[1:])
        )
        cut = whole
        for axis, column in enumerate(columns, start=1):
            cut = cut[(slice(None),) * axis + (column,)]
        wide = np.zeros((*cut.shape, 2), cut.dtype)
        for target in (np.empty(cut.shape, cut.dtype), wide[..., 0], np.empty(cut.shape, np.float64)):
            source.read_cuts(rows, [(leaf, columns, target)])
            np.testing.assert_array_equal(target, cut)
    order, positions = SingleOrder(Order(seed=1), len(local)), np.array([3, 9, 0])
    for each, targets in ((source, out), (local, expected)):
        first = jax.tree.map(lambda leaf: leaf[:3], targets)
        each.read_ordered(order, 1, positions, whole_cuts(first))
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    with pytest.raises(IndexError):
        source.read(np.array([0, len(local)]), jax.tree.map(lambda leaf: leaf[:2], out))


@needs_library
@pytest.mark.parametrize("form", ["one", "several", "members", "records", "raw records", "windows"])
def test_rows_are_those_of_local_files_whatever_the_cache_has(form, tmp_path):
    paths, options = arrays_of(tmp_path)[form]
    source, local = opened(paths, **options), ArraySource(paths, OpenOptions(**options))
    assert source.identity == local.identity
    everything = range(len(paths))
    for numbers in ([], everything, everything[1:], everything, []):
        complete(source, *numbers)
        for _ in everything:
            source[0]  # only a few files are asked about at a time
        reads_of(source)
        check(source, local)
        assert bool(reads_of(source)) == (len(numbers) < len(paths))
        assert (source.will_read is None) == (len(numbers) == len(paths))


@needs_library
def test_a_truncated_file_of_the_cache_is_read_again(tmp_path):
    paths, _ = arrays_of(tmp_path)["one"]
    source = opened(paths)
    complete(source, 0)
    source[0]
    os.truncate(f"{paths[0]}.cached", 0)
    check(source, ArraySource(paths))
    assert reads_of(source)


def test_arrays_in_a_store_without_one_range_of_bytes_a_row_are_refused(tmp_path):
    arrays_of(tmp_path)
    with pytest.raises(ValueError, match=r"compressed in all files or in none, and it is not in .*0\.npz; write"):
        opened([str(tmp_path / "0.npz"), str(tmp_path / "packed.npz")])
    np.save(tmp_path / "x.npy", np.asfortranarray(np.zeros((5, 4))))
    with pytest.raises(ValueError, match=r"x\.npy is in Fortran order; write it again: np\.save"):
        opened([str(tmp_path / "x.npy")])


def test_a_mixture_joins_no_arrays_of_a_store(tmp_path):
    paths, _ = arrays_of(tmp_path)["one"]
    near = {"x": np.zeros((5, 3), np.float32)}
    for far, joined in (({"x": paths[0]}, True), (opened(paths, columns=["x"]), False)):
        mixture = feedline.Mixture({"far": far, "near": near}, {"far": 1, "near": 1})
        assert (mixture.arrays is not None) == joined
        np.testing.assert_array_equal(mixture[29]["x"], [87, 88, 89])
