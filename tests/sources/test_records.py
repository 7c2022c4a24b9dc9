"""Records of a `grain.MapDataset` or of any object with `__len__` and `__getitem__`."""

import warnings

import grain
import numpy as np
import pytest

from feedline import Feed, FeedError, Order, Reading, RowError
from feedline._src.order.epoch import rows_at


def _dataset(n=40):
    return grain.MapDataset.range(n).map(lambda i: {"x": np.full(3, i, np.float32), "y": i})


class Records:
    """Any object with `__len__` and `__getitem__`; `at` gives other values for some rows."""

    def __init__(self, n=40, at=None):
        self.n, self.at = n, at or {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        value = self.at.get(i, {"x": np.full(3, i, np.float32)})
        if isinstance(value, Exception):
            raise value
        return value


class OneBuffer(Records):
    """A decoder that writes every record into the same memory."""

    def __init__(self, n=200):
        super().__init__(n)
        self.buffer = np.empty(3, np.float32)

    def __getitem__(self, i):
        self.buffer[:] = i
        return {"x": self.buffer[:], "y": i}


def test_records_that_share_one_buffer_are_written_before_the_next_is_read(sharding, delivered):
    one = Reading(threads=1)  # several threads would write into the buffer at once
    for batch in delivered(Feed(OneBuffer(), 64, sharding, epochs=1, reading=one)):
        np.testing.assert_array_equal(batch["x"], np.repeat(batch["y"][:, None], 3, axis=1))


def test_grains_random_maps_differ_between_epochs_and_repeat_with_the_run(sharding, delivered):
    noisy = grain.MapDataset.range(16).seed(7).random_map(lambda i, rng: {"x": rng.integers(1 << 30), "i": i})
    first, second = (delivered(Feed(noisy, 16, sharding, epochs=2)) for _ in range(2))
    assert not np.array_equal(first[0]["x"], first[1]["x"])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
    # Grain's own second epoch is what repeat() gives
    repeated = [noisy.repeat()[i]["x"] for i in range(16, 32)]
    np.testing.assert_array_equal(first[1]["x"], repeated)


def test_a_dataset_after_repeat_is_one_endless_epoch_and_refuses_an_order(sharding):
    with Feed(_dataset(5).repeat(), 8, sharding) as feed:
        batches = [np.asarray(batch["y"]) for _, batch in zip(range(3), feed, strict=False)]
        assert feed.epoch == 0
        assert feed.position == 24
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(24) % 5)
    with Feed(_dataset(5).repeat(), 8, sharding) as feed:
        feed.seek(1, 4)
        with pytest.raises(FeedError, match=r"must be below 2\^63"):
            next(feed)
    with pytest.raises(ValueError, match="one endless epoch, which no Order can shuffle"):
        Feed(_dataset(5).repeat(), 8, sharding, order=Order())


def test_a_filter_is_named_and_pointed_to_streams(sharding):
    filtered = _dataset().filter(lambda r: r["y"] % 2 == 0)
    with pytest.raises(RowError, match=r"a filter .* left None here; .*to_iter_dataset\(\).*row 39") as caught:
        Feed(filtered, 8, sharding)
    assert caught.value.row == 39


def test_a_dataset_of_batches_gives_a_warning_with_what_to_do(sharding):
    batched = _dataset(80).batch(4)
    for dataset in (batched, batched.to_iter_dataset()):
        with pytest.warns(UserWarning, match=r"leave batch\(\) out, or .* feedline.prefetch_to_mesh"):
            Feed(dataset, 8, sharding).close()
    too_few = pytest.raises(ValueError, match=r"20 rows cannot fill one of 64; leave batch\(\) of the dataset out")
    with pytest.warns(UserWarning, match="leave batch"), too_few:
        Feed(batched, 64, sharding)
    with warnings.catch_warnings(action="error"):
        Feed(_dataset(80).to_iter_dataset(), 8, sharding).close()


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"x": np.zeros(4, np.float32)}, r"batch\['x'\] is float32\[4\], but float32\[3\] in the first record"),
        ({"x": np.zeros(3, np.float64)}, r"batch\['x'\] is float64\[3\], but float32\[3\] in the first record"),
        ({"y": np.zeros(3, np.float32)}, "its tree is"),
        (OSError("disk on fire"), "the dataset failed on this row with OSError: disk on fire"),
        (None, "left None here"),
    ],
)
def test_a_record_that_differs_names_its_row_epoch_and_position(sharding, record, match):
    feed = Feed(Records(at={13: record}), 8, sharding, order=Order(shuffle=False), epochs=1)
    with feed:
        assert [np.asarray(next(feed)["x"])[0, 0]] == [0.0]
        with pytest.raises(RowError, match=match) as caught:
            next(feed)
    assert str(caught.value).endswith("[stage read, row 13, epoch 0, position 13]")
    assert (caught.value.row, caught.value.epoch, caught.value.position) == (13, 0, 13)


LOST = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
UNFIT = [
    (
        LOST,
        ValueError,
        r"batch\['x'\]: a batch has no mask, and 1 of these 3 values are masked; .*array\.filled\(0\)",
    ),
    (np.ma.masked, ValueError, r"1 of these 1 values are masked"),
    ([[1], [2, 3]], ValueError, r"batch\['x'\]: a list in a record .* got lists of different lengths; pad to one"),
    ([1, None], ValueError, "got a list of int with dtype object"),
    (
        [np.zeros(3), np.zeros(3)],
        ValueError,
        "got a list of ndarray with .*stack arrays .numpy.stack., or use a tuple",
    ),
]


@pytest.mark.parametrize(("leaf", "error", "match"), UNFIT)
def test_a_leaf_that_is_no_array_is_refused_in_the_first_record_and_in_later_ones(sharding, leaf, error, match):
    with pytest.raises(error, match=match):
        Feed(Records(at={0: {"x": leaf}}), 8, sharding)
    for stream in (False, True):
        dataset = grain.MapDataset.source(Records(at={13: {"x": leaf}}))
        with Feed(dataset.to_iter_dataset() if stream else dataset, 8, sharding) as feed:
            next(feed)
            with pytest.raises(RowError, match=match) as caught:
                next(feed)
        assert (caught.value.epoch, caught.value.position) == (0, 13)


def test_an_object_is_read_as_the_dataset_of_its_elements(sharding, delivered):
    rows, dataset = Records(), grain.MapDataset.source(Records())
    for order in (Order(3), Order(shuffle=False)):
        feeds = [Feed(source, 16, sharding, order=order, epochs=2, remainder="wrap") for source in (rows, dataset)]
        for feed in feeds:
            next(feed)
        assert feeds[0].get_state() == feeds[1].get_state()
        one, other = (delivered(feed) for feed in feeds)
        np.testing.assert_array_equal([batch["x"] for batch in one], [batch["x"] for batch in other])
        np.testing.assert_array_equal(one[0]["x"][:, 0], rows_at(order, 40, 0, np.arange(16, 32)))


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 1},
        {"prefetch": 7},
        {"reading": Reading(threads=0)},
        {"reading": Reading(threads=5, buffer=1)},
        pytest.param({"reading": Reading(workers=2)}, marks=pytest.mark.slow),
    ],
    ids=["0", "1", "7", "no threads", "5 threads", "workers"],
)
def test_workers_and_prefetch_change_no_record(sharding, delivered, options):
    batches = delivered(Feed(_dataset(50), 16, sharding, epochs=2, remainder="wrap", **options))
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in batches]), np.arange(96) % 50)
    np.testing.assert_array_equal(np.concatenate([b["x"][:, 2] for b in batches]), np.arange(96) % 50)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"n": 41}, "rows"),
        ({"at": {20: {"x": np.zeros(3, np.float32)}}}, "data"),  # the middle record, which is sampled
        ({"at": {0: {"z": np.zeros(3, np.float32)}}}, "spec"),
    ],
)
def test_a_state_over_other_records_is_refused(sharding, other, field):
    with Feed(Records(), 8, sharding) as saving, Feed(Records(**other), 8, sharding) as resumed:
        next(saving)
        with pytest.raises(ValueError, match=rf"the state was saved over other data: its '{field}' is"):
            resumed.set_state(saving.get_state())
