"""Loops that others wrote for Grain's iterators accept a feed in place of an iterator."""

import json

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import feedline


@pytest.fixture
def feeds(sharding):
    def make(batch_size=16):
        rows = grain.MapDataset.range(640).seed(1).shuffle().map(lambda i: {"x": np.int32(i)})
        return feedline.Feed(rows, batch_size, sharding)

    with make() as feed, make() as other:
        yield feed, other


def test_a_feed_has_the_face_of_a_dataset_iterator(feeds):
    feed, _ = feeds
    assert isinstance(feed, grain.DatasetIterator)
    assert iter(feed) is feed
    assert feed.element_spec == feed.spec
    feed.start_prefetch()
    assert next(feed)["x"].shape == (16,)


class MaxTextLoader:
    """`DataLoader` of MaxText (src/maxtext/common/data_loader.py at e591f30), without its options."""

    def __init__(self, data_iterator, input_data_shardings):
        self.data_iterator = data_iterator
        self.input_data_shardings = input_data_shardings

    def load_next_batch(self):
        example_batch = next(self.data_iterator)
        return jax.device_put(example_batch, self.input_data_shardings)


def state_to_text(iterator):
    """`_state_to_text` of MaxText (src/maxtext/common/grain_utility.py at e591f30)."""
    if isinstance(iterator, grain.DatasetIterator):
        return json.dumps(iterator.get_state(), indent=4)
    return iterator.get_state().decode()


def set_state_from_text(iterator, text):
    """`_set_state_from_text` of MaxText, as above."""
    if isinstance(iterator, grain.DatasetIterator):
        iterator.set_state(json.loads(text))
    else:
        iterator.set_state(text.encode())


def test_the_loader_of_maxtext_and_its_checkpoint_take_a_feed(feeds, sharding):
    feed, other = feeds
    loader = MaxTextLoader(feed, sharding)
    for _ in range(3):
        loader.load_next_batch()
    text = state_to_text(feed)
    following = loader.load_next_batch()
    assert following["x"].sharding == sharding
    set_state_from_text(other, text)
    np.testing.assert_array_equal(MaxTextLoader(other, sharding).load_next_batch()["x"], following["x"])


def test_the_checkpoint_handler_of_grain_takes_a_feed(feeds, tmp_path):
    feed, other = feeds
    next(feed)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(feed=grain.checkpoint.CheckpointSave(feed)))
        following = next(feed)
        manager.restore(1, args=ocp.args.Composite(feed=grain.checkpoint.CheckpointRestore(other)))
    np.testing.assert_array_equal(next(other)["x"], following["x"])
