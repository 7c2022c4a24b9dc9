"""Each wrong argument raises an error that names the rule, the value and the fix, and leaves no thread."""

import grain
import jax
import numpy as np
import pyarrow as pa
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline import Feed, Order, prefetch_to_mesh

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
P = PartitionSpec
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SHARDING = NamedSharding(MESH, P("data"))
X = np.zeros((64, 6), np.float32)

MASKED = np.ma.masked_array(np.zeros(64, np.float32), mask=np.arange(64) == 0)


class Half:
    """A RowSource that lacks methods."""

    spec = jax.ShapeDtypeStruct((), np.float32)

    def read(self, rows, out):
        pass


class OnDisk:
    """Like a group or an array of HDF5."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)

    def __getitem__(self, i):
        return self.held[i]

    def keys(self):
        return self.held.keys()

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("the whole file is read")


class Split(dict):
    """Like a DatasetDict of Hugging Face, which is a dict, but not a pytree for JAX."""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 8.0}, "batch_size must be an integer, got 8.0"),
        ({"batch_size": 10}, r"the batch size must be a multiple of the 4 shards .* 8 or 12 would"),
        ({"batch_size": 128}, '64 rows cannot fill one of 128; use a batch size of at most 64, or rem.*"pad"'),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"prefetch": -1}, "prefetch must be at least 0, got -1"),
        ({"batch_size": 10**30}, f"batch_size must be at most {2**31 - 1}, got {10**30}"),
        ({"remainder": "truncate"}, r"remainder must be one of \('drop', 'pad', 'wrap'\), got 'truncate'"),
        ({"with_place": 1}, "with_place must be True or False, got 1"),
        ({"source": {"place": X}, "with_place": True}, r"adds a leaf 'place', .*: it has the keys \['place'\]"),
        ({"batch_size": []}, r"pairs as in \[\(0, 256\), \(1000, 512\)\], got \[\]"),
        ({"batch_size": [(0, 8, 1)]}, "pairs as in"),
        ({"batch_size": [(1, 8)]}, r"ascending steps, the first at 0, got \[1\]; sort them"),
        ({"batch_size": [(0, 8), (0, 16)]}, "ascending steps"),
        ({"batch_size": [(0, 8), (-1, 16)]}, "the first step of a size must be at least 0"),
        ({"batch_size": [(0, 8), (5, 0)]}, "batch_size must be at least 1, got 0"),
        ({"batch_size": [(0, 8), (5, 10)]}, "multiple of the 4 shards .*, got 10"),
        ({"batch_size": [(0, 8), (5, 104)]}, "64 rows cannot fill one of 104"),
        ({"batch_size": [(0, 8.0)]}, "batch_size must be an integer"),
        ({"remainder": "pad"}, "a plain dict whose keys are other strings: it is one array without a name"),
        ({"source": {"valid": X}, "remainder": "pad"}, r"it has the keys \['valid'\]"),
        ({"source": {0: X}, "remainder": "pad"}, r"it has the keys \[0\]"),
        ({"source": X.astype(np.longdouble)}, "holds numbers and booleans, got dtype float128"),
        ({"order": 7}, "order must be a feedline.Order or None, got 7"),
        ({"reading": {"threads": 2}}, "reading must be a feedline.Reading"),
        ({"transform": "crop"}, r"transform must be a function \(batch, rows\) -> batch, got 'crop'"),
        ({"sharding": None}, r"sharding must be a jax.sharding.Sharding, got None; for example NamedSharding"),
        ({"source": {"x": X, "y": X}, "sharding": {"x": SHARDING}}, "a tree that is a prefix of the batch"),
        ({"sharding": NamedSharding(MESH, P("data", None, "model"))}, "names 3 axes, but the leaf has 2"),
        ({"source": np.zeros((64, 5)), "sharding": NamedSharding(MESH, P("data", "model"))}, "size of axis 1"),
        ({"source": {"x": X, "y": X[:-1]}}, "same number of rows, but .*has 64, .*has 63"),
        ({"source": X[:0]}, "at least one row"),
        ({"source": {}}, "at least one array"),
        ({"source": None}, "a source is a tree of arrays, a path or an object with rows, got None"),
        ({"source": 7}, "a source is a tree of arrays and .npy paths, a path or glob, .* got int"),
        ({"source": iter([X])}, "pass an iterator of batches to prefetch_to_mesh"),
        ({"source": [X, X]}, "source: a list may mean rows or columns, .* tuple or .* numpy.stack"),
        ({"source": {"x": ["a.npy"]}}, r"source\['x'\]: a list may mean rows .* or, for rows in files, a glob"),
        ({"source": {"x": MASKED}}, r"source\['x'\]: .* 1 of these 64 values are masked; .*filled\(0\)"),
        ({"transform": lambda x, rows: MASKED[: len(x)]}, "batch: a batch has no mask"),
        ({"transform": lambda x, rows: next(iter(()))}, "a transform must not raise StopIteration, .*a default"),
        ({"source": b"gone.npy"}, "there is no file gone.npy"),
        ({"source": Half}, r"got the class Half; pass Half\(\.\.\.\)"),
        ({"source": Half()}, "a RowSource needs .* Half lacks __len__, identity, close; .*sources.md"),
        ({"source": pa.table({"x": X[:, 0]})}, r"a table is not a source, .* a Table; .*table\[name\] for"),
        ({"source": OnDisk({"x": X})}, r"OnDisk has names: .*KeyError: 0; pass one array, .*\]\[\.\.\.\]"),
        ({"source": Split(train=X)}, r"Split has names: .*; pass one array, source\[name\], or all arrays"),
        ({"source": {"x": OnDisk(X)}}, r"got OnDisk; leaf\[\.\.\.\] reads an array of HDF5"),
        ({"source": "gone.npy"}, "there is no file gone.npy"),
        ({"source": "gone-*.npy"}, r"no file matches gone-\*.npy"),
        ({"source": grain.MapDataset.source([])}, "at least one row"),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises((ValueError, TypeError, RuntimeError, FileNotFoundError), match=match):
        Feed(**{"source": X, "batch_size": 8, "sharding": SHARDING, **arguments})


def test_columns_of_a_table_and_masked_arrays_without_a_mask_are_leaves():
    table = pa.table({"x": np.arange(64), "y": np.arange(64) % 2 == 0})
    source = {**{name: table[name] for name in table.column_names}, "z": np.ma.masked_array(np.arange(64))}
    with Feed(source, 64, SHARDING, order=Order(shuffle=False)) as feed:
        batch = next(feed)
    for name in source:
        np.testing.assert_array_equal(batch[name], np.asarray(source[name]))


def test_a_transform_that_masks_a_later_row_is_refused():
    def mask(x, rows):
        return np.ma.masked_array(x, mask=np.repeat(rows.index[:, None] == 13, 6, 1))

    with Feed(X, 8, SHARDING, order=Order(shuffle=False), transform=mask) as feed:
        next(feed)
        with pytest.raises(ValueError, match=r"6 of these .* values are masked"):
            next(feed)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"x": np.zeros(6)}, "the batch size must be a multiple of the 4 shards .* got 6; 4 or 8 would work"),
        ({"x": np.array(["a"])}, "an accelerator holds numbers and booleans"),
        ({"x": np.array([2**40] * 8)}, "1099511627776 does not fit"),
        ({"x": MASKED}, r"batch\['x'\]: a batch has no mask, and 1 of these 64 values are masked; .*filled\(0\)"),
        (np.float32(1), "a leaf needs a first axis that counts rows, got a scalar"),
    ],
)
def test_batches_that_do_not_fit_the_mesh(batch, match):
    with (
        prefetch_to_mesh(iter([batch]), SHARDING) as batches,
        pytest.raises((ValueError, TypeError, RuntimeError), match=match),
    ):
        next(batches)
