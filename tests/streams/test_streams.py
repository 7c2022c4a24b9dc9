"""Streams (`grain.IterDataset`): how epochs end, the state, and what a batch holds."""

import threading

import grain
import numpy as np
import pytest

from feedline import Feed, FeedError, Order, Reading


def _stream(n, keep=lambda record: True):
    return grain.MapDataset.range(n).map(lambda i: {"x": np.int32(i)}).to_iter_dataset().filter(keep)


def test_a_transform_sees_epoch_and_position(sharding):
    def transform(batch, rows):
        return {"x": batch["x"], "at": np.stack([rows.epoch, rows.position], 1).astype(np.int32)}

    with Feed(_stream(12), 8, sharding, epochs=2, remainder="wrap", transform=transform) as feed:
        at = np.concatenate([np.asarray(batch["at"]) for batch in feed])
    np.testing.assert_array_equal(at[:, 0] * 12 + at[:, 1], np.arange(24))


def test_options_that_a_stream_cannot_have_are_refused(sharding):
    with pytest.raises(ValueError, match="a stream has no other order than its own"):
        Feed(_stream(20), 8, sharding, order=Order())
    with pytest.raises(ValueError, match="a stream brings its own workers"):
        Feed(_stream(20), 8, sharding, reading=Reading(workers=1))
    with pytest.raises(ValueError, match="at least one row, got an IterDataset without an item"):
        Feed(_stream(20, lambda record: False), 8, sharding)
    with Feed(_stream(20), 8, sharding, epochs=1) as feed:
        with pytest.raises(TypeError, match="len needs passes of known length, but this feed reads a stream"):
            len(feed)
        with pytest.raises(TypeError, match="does not know its length"):
            _ = feed.steps_per_epoch
        with pytest.raises(TypeError, match="no row indices"):
            feed.rows_of(feed.get_state())
        with pytest.raises(ValueError, match="can seek to the start of an epoch only, got position 3"):
            feed.seek(0, 3)
        feed.seek(1)
        assert int(next(feed)["x"][0]) == 0
        assert feed.epoch == 1


def test_the_error_of_an_item_of_another_shape_names_its_position(sharding):
    ragged = grain.MapDataset.range(20).map(lambda i: {"x": np.zeros(3 if i == 11 else 2)}).to_iter_dataset()
    with Feed(ragged, 8, sharding, epochs=1) as feed:
        next(feed)
        with pytest.raises(FeedError, match=r"is float64\[3\], but float64\[2\] in the first record.*row 11"):
            next(feed)


@pytest.mark.parametrize("closed", [True, False])
def test_after_an_interrupt_a_stream_waits_for_the_read_in_progress(sharding, closed):
    """Iterators of one lane may share state, so two threads must not read them at once."""
    inside, gate, reads = threading.Event(), threading.Event(), []

    def item(i):
        reads.append(i)
        if i == 16 and not inside.is_set():
            inside.set()
            assert gate.wait(30)
        return {"x": np.int32(i)}

    stream = grain.MapDataset.range(40).to_iter_dataset(ONE).map(item)
    with Feed(stream, 8, sharding, epochs=1) as feed:
        batches = [next(feed), next(feed)]
        assert inside.wait(30)
        before, feed._run = len(reads), None
        if closed:  # by the interrupt; else a second interrupt came before the close
            feed._stop(0, reads=False)
        running = threading.enumerate()
        feed.start()
        (thread,) = [t for t in threading.enumerate() if t.name == "feedline-place" and t not in running]
        thread.join(0.2)  # longer than it takes to read on
        assert len(reads) == before
        gate.set()
        batches += list(feed)
    assert np.concatenate([np.asarray(batch["x"]) for batch in batches]).tolist() == list(range(40))


ONE = grain.ReadOptions(0, 0)


def _stopping(at):
    def stopping(x):
        return {"x": np.int32(next(iter(() if x >= at else (x,))))}

    return stopping


class Own(grain.DatasetIterator):
    """A user's iterator whose `__next__` calls a helper, which raises StopIteration."""

    def __next__(self):
        return self._read()

    def _read(self):
        return next(self._parent)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


class OwnDataset(grain.IterDataset):
    def __init__(self, parent, iterator):
        super().__init__(parent)
        self.iterator = iterator

    def __iter__(self):
        return self.iterator(self._parent.__iter__())


MISTAKES = {
    "map": lambda at: grain.MapDataset.range(40).to_iter_dataset(ONE).map(_stopping(at)),
    "map of a MapDataset": lambda at: grain.MapDataset.range(40).map(_stopping(at)).to_iter_dataset(ONE),
    "on Grain's threads": lambda at: grain.MapDataset.range(40).map(_stopping(at)).to_iter_dataset(),
    "filter": lambda at: _stream(40).filter(lambda row: _stopping(at)(row["x"]) is not None),
    "under a user's iterator": lambda at: OwnDataset(
        grain.MapDataset.range(40).to_iter_dataset(ONE).map(_stopping(at)), Own
    ),
    "over a user's iterator": lambda at: OwnDataset(grain.MapDataset.range(40).to_iter_dataset(ONE), Own).map(
        _stopping(at)
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_stopiteration_of_a_function_is_no_end(sharding, kind):
    message = "lane 0 failed after {} items of epoch 0 with StopIteration, raised by a function .*; give next"
    with Feed(MISTAKES[kind](19), 8, sharding, epochs=1) as feed:
        for _ in range(2):
            next(feed)
        for _ in range(2):
            with pytest.raises(FeedError, match=message.format(19)):
                next(feed)
    with pytest.raises(FeedError, match=message.format(0)):
        Feed(MISTAKES[kind](0), 8, sharding, epochs=1)


@pytest.mark.parametrize(
    "over", [lambda stream: stream, lambda stream: stream.map(dict), lambda s: s.filter(bool)]
)
def test_the_end_of_a_users_own_iterator_is_an_end(sharding, over):
    stream = over(OwnDataset(_stream(19), Own))
    with Feed(stream, 8, sharding, epochs=2) as feed:
        assert [int(batch["x"][0]) for batch in feed] == [0, 8] * 2
        assert feed.statistics().dropped_rows == 6


@pytest.mark.parametrize("prefetch", [0, 1, 7])
@pytest.mark.parametrize("threads", [None, 0, 5])
def test_threads_and_prefetch_change_no_item(sharding, threads, prefetch):
    reading = Reading(threads=threads)
    with Feed(_stream(40), 8, sharding, epochs=2, reading=reading, prefetch=prefetch) as feed:
        items = np.concatenate([np.asarray(batch["x"]) for batch in feed])
        assert feed.statistics().threads == 0  # only Grain's iterator may have threads
    assert items.tolist() == [*range(40)] * 2


def test_a_state_of_another_stream_is_refused_by_its_first_item(sharding):
    with Feed(_stream(40), 8, sharding) as saving:
        next(saving)
        state = saving.get_state()
    others = {
        "data": _stream(40, lambda record: record["x"] > 0),
        "spec": grain.MapDataset.range(40).to_iter_dataset(),
    }
    for field, stream in others.items():
        message = f"the state was saved over other data: its '{field}' is"
        with Feed(stream, 8, sharding) as other, pytest.raises(ValueError, match=message):
            other.set_state(state)
    with Feed(_stream(60), 8, sharding) as longer:  # begins with the same items
        longer.set_state(state)
        assert np.asarray(next(longer)["x"]).tolist() == list(range(8, 16))
