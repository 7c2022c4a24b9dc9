"""A `RowSource` of the user's own: a format that feedline does not know, and more rows than any disk holds."""

import grain
import jax
import numpy as np
import pytest

from feedline import Feed, Order, Reading, RowError, RowSource, open_source
from feedline._src.order.epoch import rows_at


class Squares:
    """Row i holds i and i² mod 1009. Nothing is stored, so there may be any number of rows."""

    def __init__(self, count, fails_at=None, fault=None):
        self.spec = {"row": jax.ShapeDtypeStruct((2,), np.uint32), "square": jax.ShapeDtypeStruct((), np.int16)}
        self.identity = {"kind": "squares", "count": count}
        self.count, self.fails_at, self.fault = count, fails_at, fault
        self.read_rows = self.closed = 0

    def __len__(self):
        return self.count

    def read(self, rows, out):
        if self.fails_at is not None and (rows == self.fails_at).any():
            if self.fault is None:
                return out
            raise self.fault
        self.read_rows += len(rows)
        out["row"][:, 0], out["row"][:, 1] = rows >> 32, rows & 0xFFFFFFFF
        out["square"][:] = (rows % 1009) ** 2 % 1009
        return None

    def close(self):
        self.closed += 1


def _index(batch):
    row = np.asarray(batch["row"]).astype(np.int64)
    return (row[:, 0] << 32) + row[:, 1]


@pytest.mark.parametrize("count", [100, 10**12 + 1, 2**40 + 1])
def test_any_number_of_rows_is_read_from_any_place(sharding, count):
    source = Squares(count)
    assert isinstance(source, RowSource)
    start = count - 50
    with Feed(source, 16, sharding, order=Order(seed=9), epochs=2, reading=Reading(threads=1, buffer=1)) as feed:
        feed.seek(1, start)
        batches = [
            batch for _, batch in zip(range(4), feed, strict=False)
        ]  # list() would make room for a whole pass
        assert len(batches) == 3
        for k, batch in enumerate(batches):
            index = rows_at(Order(seed=9), count, 1, np.arange(start + 16 * k, start + 16 * k + 16))
            np.testing.assert_array_equal(_index(batch), index)
            np.testing.assert_array_equal(np.asarray(batch["square"]), (index % 1009) ** 2 % 1009)
    assert source.read_rows == 48
    assert source.closed == 0  # the user closes it


def test_neither_a_source_nor_a_transform_can_change_which_rows_are_read(sharding):
    class Changing(Squares):
        def read(self, rows, out):
            rows += 1

    def transform(batch, rows):
        assert not any(vars(rows)[name].flags.writeable for name in ("epoch", "position", "index", "key"))
        return batch

    with Feed(Changing(64), 16, sharding) as feed, pytest.raises(RowError, match=r"with ValueError: .*read-only"):
        next(feed)
    with Feed(Squares(64), 16, sharding, transform=transform) as feed:
        next(feed)


def test_rows_are_announced_ahead_also_to_a_function_that_returns_nothing(sharding):
    announced = {}

    class Fetching(Squares):
        def will_read(self, rows, ahead):
            announced.setdefault(int(rows[0]), ahead)

    with Feed(Fetching(320), 16, sharding, order=Order(shuffle=False), prefetch=0) as feed:
        next(feed)
    assert [announced[16 * ahead] for ahead in range(4)] == [0, 1, 2, 3]


def test_rows_are_announced_again_after_a_false_of_numpy(sharding):
    announced = []

    class Fetching(Squares):
        def will_read(self, rows, ahead):
            announced.append(ahead)
            return np.bool_(ahead < 2)

    with Feed(Fetching(320), 16, sharding, prefetch=0) as feed:
        next(feed), next(feed)
    assert announced == [0, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, "read writes its rows into out, and must not return a dict"),
        (
            OSError("the disk is gone"),
            r"Squares failed to read this row with OSError: .* row 33, epoch 0, position 33\]",
        ),
        (StopIteration(), "Squares failed to read 16 rows, the first of them 32, with StopIteration"),  # of no row
    ],
)
def test_what_a_source_raises_is_an_error_of_the_feed(sharding, fault, message):
    with Feed(Squares(64, fails_at=33, fault=fault), 16, sharding, order=Order(shuffle=False)) as feed:
        next(feed), next(feed)
        with pytest.raises(RowError, match=message) as caught:
            next(feed)
        assert fault is None or caught.value.__cause__ is fault
        assert feed.position == 32


@pytest.mark.slow
def test_workers_take_whatever_pickles(sharding, delivered):
    offset = np.arange(64)  # in memory: each worker gets a copy of it

    class Shifted(Squares):
        def read(self, rows, out):
            super().read(offset[rows], out)

    dataset = grain.MapDataset.range(64).map(lambda i: {"row": np.array([0, offset[i]], np.uint32)})
    for source in (Shifted(64), dataset):
        feed = Feed(source, 16, sharding, order=Order(shuffle=False), epochs=1, reading=Reading(workers=1))
        np.testing.assert_array_equal(np.concatenate([_index(batch) for batch in delivered(feed)]), offset)


# --- what the sources of feedline offer in addition ---


@pytest.fixture
def shards(tmp_path):
    for i in range(3):
        np.savez(tmp_path / f"{i}.npz", x=np.arange(8).reshape(4, 2) + 8 * i, label=np.arange(4) + 4 * i)
    return open_source(tmp_path / "*.npz")


def test_one_row_of_a_source_is_a_tree_in_memory_of_its_own(shards):
    row = shards[-1]
    assert row["label"] == 11
    assert type(row["label"]) is np.int64
    row["x"][:] = 0
    assert shards[11]["x"].tolist() == [22, 23]
    assert shards[np.int32(5)]["label"] == 5
    assert [int(row["label"]) for row in shards] == list(range(12))  # ends with the IndexError
    assert isinstance(shards, RowSource)


@pytest.mark.parametrize("index", [slice(3), "x", 1.0, [0, 1], None])
def test_an_index_that_is_not_an_integer_is_a_type_error(shards, index):
    with pytest.raises(TypeError, match=r"source\[i\] is one row, got .*grain\.MapDataset\.source\(source\)\["):
        shards[index]
