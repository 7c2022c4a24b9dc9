"""After `feed.move` to another mesh, or `feed.start`, a feed delivers the rows of a feed that did neither."""

import collections
import gc
import itertools
import threading
import time

import grain
import jax
import numpy as np
import pytest
from background import PATIENCE_S
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

ROWS = {"row": np.arange(240, dtype=np.int32), "x": np.arange(480, dtype=np.float32).reshape(240, 2)}


def on(count):
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), PartitionSpec("data"))


def taken(feed, count):
    return [(np.asarray(b["row"]).tolist(), len(b["row"].devices())) for b in itertools.islice(feed, count)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", ["memory", "file", "mixture", "sizes"])
def test_the_rows_of_a_feed_that_moves_are_those_of_one_that_does_not(tmp_path, source, prefetch):
    np.savez(tmp_path / "rows.npz", **ROWS)
    made = {
        "memory": lambda: ROWS,
        "file": lambda: tmp_path / "rows.npz",
        "mixture": lambda: feedline.Mixture({"a": ROWS, "b": ROWS}, weights={"a": 0.7, "b": 0.3}),
        "sizes": lambda: ROWS,
    }[source]
    size = [(0, 24), (4, 48)] if source == "sizes" else 24
    with feedline.Feed(made(), size, on(8), prefetch=prefetch) as feed:
        whole = [rows for rows, _ in taken(feed, 13)]
    with feedline.Feed(made(), size, on(8), prefetch=prefetch) as feed:
        moved = taken(feed, 3)
        state = feed.get_state()
        feed.move(on(6))
        assert feed.get_state() == state
        assert feed.spec["x"].sharding == feed.options.sharding == on(6)
        moved += taken(feed, 3)
        feed.move(on(8))
        feed.move(on(2))
        moved += taken(feed, 3)
        feed.seek(feed.epoch, feed.position)
        feed.move(on(8))
        moved += taken(feed, 4)
        assert feed.statistics().batches == 13
    assert [rows for rows, _ in moved] == whole
    assert [devices for _, devices in moved] == [8] * 3 + [6] * 3 + [2] * 3 + [8] * 4


def test_a_feed_that_is_closed_after_a_move_keeps_no_memory():
    with feedline.Feed(ROWS, 24, on(8)) as feed:
        taken(feed, 3)
        feed.move(on(4))
    until = time.monotonic() + PATIENCE_S
    while feed.statistics().host_bytes and time.monotonic() < until:  # a look at the devices may keep a batch
        gc.collect()  # jax drops some references only in a later call, or here
        time.sleep(0.01)
    assert not feed.statistics().host_bytes


def items(lane, count):
    return grain.MapDataset.range(1000)[lane::count].map(lambda i: {"row": np.int32(i)}).to_iter_dataset()


ITEMS = [{"row": np.int32(i)} for i in range(240)]


@pytest.mark.parametrize(
    "source",
    [items(0, 1), feedline.Lanes(items, 2), collections.UserList(ITEMS), grain.MapDataset.source(ITEMS)],
    ids=["stream", "lanes", "objects", "dataset"],
)
def test_streams_lanes_objects_and_datasets_move(source):
    order = feedline.Order(shuffle=False) if hasattr(source, "__len__") else None
    with feedline.Feed(source, 24, on(8), order=order) as feed:
        moved = taken(feed, 3)
        feed.move(on(4))
        moved += taken(feed, 3)
    assert [sorted(rows) for rows, _ in moved] == np.arange(144).reshape(6, 24).tolist()
    assert [devices for _, devices in moved] == [8] * 3 + [4] * 3


def test_the_iterators_of_a_stream_wait_until_those_before_the_move_have_ended(monkeypatch):
    """Old and new iterators may share state, and a read may take longer than a move waits for it."""
    reading = threading.Lock()

    def read(i):
        assert reading.acquire(blocking=False)
        time.sleep(1e-3)
        reading.release()
        return {"row": np.int32(i)}

    monkeypatch.setattr("feedline._src.feed_base.GRACE_S", 0)
    source = grain.MapDataset.range(1000).map(read).to_iter_dataset(grain.ReadOptions(0, 0))
    with feedline.Feed(source, 24, on(8)) as feed:
        moved = taken(feed, 1)
        feed.move(on(4))
        moved += taken(feed, 5)
    assert [rows for rows, _ in moved] == np.arange(144).reshape(6, 24).tolist()


def test_a_move_that_does_not_suit_changes_nothing():
    with feedline.Feed(ROWS, 24, on(8), order=feedline.Order(shuffle=False)) as feed:
        next(feed)
        with pytest.raises(ValueError, match="24"):
            feed.move(on(7))
        with pytest.raises(TypeError, match=r"must be a jax\.sharding\.Sharding"):
            feed.move("cpu")
        with feed.diagnose(steps=40), pytest.raises(ValueError, match="while it is diagnosed"):
            feed.move(on(4))
        assert feed.options.sharding == on(8)
        assert taken(feed, 1) == [(list(range(24, 48)), 8)]
    with pytest.raises(ValueError, match="the feed is closed"):
        feed.move(on(4))


def test_a_feed_that_is_started_reads_before_its_first_next():
    read = threading.Event()

    def transform(batch, rows):
        if len(rows.index) > 1:  # not the call with one row while the feed is built
            read.set()
        return batch

    rows, order = {"row": ROWS["row"][:48]}, feedline.Order(shuffle=False)
    with feedline.Feed(rows, 24, on(8), order=order, epochs=1, transform=transform) as feed:
        feed.set_state({**feed.get_state(), "position": 24})
        feed.start()
        assert read.wait(PATIENCE_S)
        feed.start()  # a second one does nothing
        assert feed.get_state()["position"] == 24
        assert taken(feed, 5) == [(list(range(24, 48)), 8)]
        feed.start()  # at the end of a pass, it does nothing
        assert taken(feed, 5) == [(list(range(24)), 8), (list(range(24, 48)), 8)]
    with pytest.raises(ValueError, match="the feed is closed"):
        feed.start()
