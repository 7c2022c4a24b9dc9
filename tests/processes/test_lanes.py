"""Lanes in several processes: batches and ends as in one process; checkpoints are restored on other topologies."""

import contextlib
import json
import threading
import time
import unittest.mock

import grain
import jax
import numpy as np
import pytest

import feedline
from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import Coordination, coordination

from .cases import case
from .launch import ALONE, TOPOLOGIES, TWO_OR_FOUR
from .layouts import sharding_of
from .meeting import meet, shared
from .values import PerProcess, assert_same

pytestmark = pytest.mark.slow

SIZE, EPOCHS, PATIENCE_S = 16, 2, 120
LENGTHS = {"drop": [30, 23, 26, 41], "pad": [30, 3, 0, 21]}
LAYOUTS = ["data", "permuted", "model", "model_across", "sequence", "one_leaf_everywhere"]
STRIDE = 1000


def lanes_of(lengths, read=lambda lane, i: None):
    """Item i of lane l has y = l · STRIDE + i; `read(lane, i)` is called for each item."""

    def make_lane(lane, count):
        def item(i):
            read(lane, i)
            y = lane * STRIDE + i
            return {"x": np.full(8, y, np.int32), "y": np.int32(y), "z": np.float32([y, -y])}

        return grain.MapDataset.range(lengths[lane]).map(item).to_iter_dataset(grain.ReadOptions(0, 0))

    return feedline.Lanes(make_lane, len(lengths))


def epoch_of(lengths, size, remainder, begun=0):
    """Yields (y, valid) for each batch of an epoch, from item `begun` of each lane on."""
    share = size // len(lengths)
    for start in range(begun, max(lengths), share):
        left = [min(max(n - start, 0), share) for n in lengths]
        if remainder == "drop" and min(left) < share:
            return
        y = [
            lane * STRIDE + start + i % count if count else 0
            for lane, count in enumerate(left)
            for i in range(share)
        ]
        yield np.int32(y), np.array([i < count for count in left for i in range(share)])


def assert_holds(batches, expected):
    assert len(batches) == len(expected)
    for batch, (y, valid) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["y"], y)
        np.testing.assert_array_equal(batch["x"], np.tile(y[:, None], 8))
        np.testing.assert_array_equal(batch["z"], np.stack([y, -y], 1).astype(np.float32))
        if "valid" in batch:
            np.testing.assert_array_equal(batch["valid"], valid)


@case(LAYOUTS, LENGTHS)
def a_pass(here, layout, remainder):
    ran = set()
    lanes = lanes_of(LENGTHS[remainder], lambda lane, i: ran.add(lane))
    sharding = sharding_of(layout, here.devices)
    with feedline.Feed(lanes, SIZE, sharding, epochs=EPOCHS, remainder=remainder) as feed:
        ran.clear()  # building a feed looks at one item
        batches, places = [], []
        for batch in feed:
            batches.append(batch)
            state = feed.get_state()
            places.append([state["step"], state["epoch"], state["position"]])
        counted = feed.statistics()
    saved = [int(lane) for lane in state["lanes"] if state["writers"][int(lane)] == jax.process_index()]
    return {
        "batches": batches,
        "places": places,
        "counted": [counted.rows, counted.dropped_rows],
        "lanes": PerProcess([sorted(map(int, state["lanes"])), sorted(ran), saved]),
    }


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("remainder", LENGTHS)
def test_batches_and_ends_are_those_of_one_process(outcome, topology, layout, remainder):
    found, alone = (outcome(where, a_pass, layout, remainder) for where in (topology, ALONE))
    lengths = LENGTHS[remainder]
    epoch = list(epoch_of(lengths, SIZE, remainder))
    assert_holds(found["batches"], epoch * EPOCHS)
    assert_same(found["batches"], alone["batches"])
    assert found["places"] == alone["places"]
    real = EPOCHS * sum(valid.sum() for _, valid in epoch)
    assert found["counted"] == [real, EPOCHS * sum(lengths) - real]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_process_reads_its_own_lanes_and_each_lane_is_saved_once(outcome, topology, layout):
    per_process = outcome(topology, a_pass, layout, "drop")["lanes"]
    assert sorted(lane for _, _, saved in per_process for lane in saved) == list(range(4))
    for held, ran, _ in per_process:
        assert ran == held
    if layout == "data":
        each = 4 // topology.processes
        assert [held for held, _, _ in per_process] == [
            list(range(i * each, (i + 1) * each)) for i in range(topology.processes)
        ]


LEGS = [*TOPOLOGIES, ALONE]
SIZES = [16, 8, 32, 24]


@case(["data", "model_across"])
def a_leg(here, layout):
    """Two batches from where the topology before this one stopped, restored from files."""
    before = here.before()
    size = SIZES[LEGS.index((jax.process_count(), jax.local_device_count()))]
    lanes = lanes_of([40, 31, 90, 33])
    with feedline.Feed(lanes, size, sharding_of(layout, here.devices), epochs=2) as feed:
        if before is not None:
            feed.set_state(json.loads(before["state"]))
        batches = [batch for _, batch in zip(range(2), feed, strict=False)]
        folder = shared(f"a_leg-{layout}", str(here.folder))
        feedline.save_lanes(feed.get_state(), folder)
        meet("saved")
        state = feedline.load_lanes(folder)
        meet("loaded")
    return {"batches": batches, "state": json.dumps(state)}


@pytest.mark.parametrize("layout", ["data", "model_across"])
def test_a_checkpoint_is_resumed_on_other_topologies_and_batch_sizes(outcome, layout):
    legs = [outcome(topology, a_leg, layout) for topology in LEGS]
    begun, expected = 0, []
    for size in SIZES[:3]:
        expected += list(epoch_of([40, 31, 90, 33], size, "drop", begun))[:2]
        begun += 2 * size // 4
    expected += list(epoch_of([40, 31, 90, 33], SIZES[3], "drop"))[
        :2
    ]  # of the next epoch: one lane has 3 items left, of the 6 for a batch
    assert_holds([batch for leg in legs for batch in leg["batches"]], expected)
    assert [json.loads(leg["state"])["step"] for leg in legs] == [2, 4, 6, 8]


@case()
def fails_once(here):
    """Reading lane 3 fails once, in the fourth batch."""
    failures = iter([OSError("the disk is gone")])

    def read(lane, i):
        if (lane, i) == (3, 13):
            for error in failures:
                raise error

    with feedline.Feed(lanes_of([40] * 4, read), SIZE, sharding_of("data", here.devices), epochs=1) as feed:
        before = [next(feed) for _ in range(3)]
        with pytest.raises(feedline.FeedError) as raised:
            next(feed)
        return {"told": PerProcess((str(raised.value), raised.value.where)), "batches": [*before, *feed]}


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
def test_a_failure_is_raised_at_the_same_step_everywhere_and_no_row_is_lost(outcome, topology):
    found = outcome(topology, fails_once)
    failed = topology.processes - 1
    message = "lane 3 failed after 13 items of epoch 0 with OSError: the disk is gone"
    for process, (told, where) in enumerate(found["told"]):
        if process == failed:
            assert (told, where) == (f"{message} [stage read]", {"stage": "read"})
        else:
            assert told == f"FeedError: {message} [stage read, process {failed}]"
            assert where == {"stage": "read", "process": failed}
    assert_holds(found["batches"], list(epoch_of([40] * 4, SIZE, "drop")))


UNDONE = {"counted": (Coordination, "increment"), "concluded": (AllGather, "_publish")}


@case(UNDONE)
def is_interrupted_while_it_agrees(here, undone):
    """Ctrl-C in an all-gather after this process has set its value, but before it increments or publishes."""
    of, name = UNDONE[undone]
    usual, interrupts = getattr(of, name), iter([KeyboardInterrupt])

    def interrupted_once(*arguments):
        for interrupt in interrupts:
            raise interrupt
        return usual(*arguments)

    with feedline.Feed(lanes_of([40] * 4), SIZE, sharding_of("data", here.devices), prefetch=0) as feed:
        batches = []
        with unittest.mock.patch.object(of, name, interrupted_once):
            while len(batches) < 4:
                with contextlib.suppress(KeyboardInterrupt):
                    batches.append(next(feed))
        return batches


@pytest.mark.parametrize("undone", UNDONE)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_an_interrupt_during_the_all_gather_does_not_stop_other_processes(outcome, topology, undone):
    found = outcome(topology, is_interrupted_while_it_agrees, undone)
    assert_holds(found, list(epoch_of([40] * 4, SIZE, "drop"))[:4])


@case()
def all_go_back(here):
    """Every process seeks to the start, past rounds of the all-gather with deleted keys, and rounds with keys."""
    with feedline.Feed(lanes_of([400] * 4), SIZE, sharding_of("data", here.devices)) as feed:
        for back in range(3):
            batches = [batch for _, batch in zip(range(40 * back + 3), feed, strict=False)]
            meet("before")
            feed.seek(0)
        meet("done")
        return batches


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_all_processes_may_seek_back(outcome, topology):
    assert_holds(outcome(topology, all_go_back), list(epoch_of([400] * 4, SIZE, "drop"))[:83])


@case()
def is_closed_while_it_waits(here):
    """Process 0 reads while the others do not; its feed is closed, and no thread is left."""
    meet("waits")
    with feedline.Feed(lanes_of([40] * 4), SIZE, sharding_of("data", here.devices)) as feed:
        if jax.process_index() == 0 and jax.process_count() > 1:
            told = []

            def read():
                with pytest.raises(ValueError, match="the feed is closed") as raised:
                    next(feed)
                told.append(raised)

            reader = threading.Thread(target=read)
            reader.start()
            service = coordination()
            while not service.dir(f"{feed._stages.access.gather._path}/"):  # until its loader is in the all-gather
                pass
            feed.close(PATIENCE_S)
            reader.join(PATIENCE_S)
            assert told
            assert not any(thread.name == "feedline-place" for thread in threading.enumerate())
        meet("closed")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_feed_that_waits_for_other_processes_can_be_closed(outcome, topology):
    assert outcome(topology, is_closed_while_it_waits) is None


@case()
def prefetches_differ(here):
    prefetch = 2 if jax.process_index() == 1 else 1
    with pytest.raises(feedline.ProcessError) as raised:
        feedline.Feed(lanes_of([40] * 4), SIZE, sharding_of("data", here.devices), prefetch=prefetch)
    return str(raised.value)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_another_prefetch_is_an_error_and_no_process_hangs(outcome, topology):
    assert "must build the same one: process 1 has prefetch 2, " in outcome(topology, prefetches_differ)


@case(on=lambda: TWO_OR_FOUR)
def prefetch_is_auto(here):
    with pytest.raises((ValueError, feedline.ProcessError)) as raised:
        feedline.Feed(lanes_of([40] * 4), SIZE, sharding_of("data", here.devices), prefetch="auto")
    return str(raised.value)[-60:]


@pytest.mark.parametrize("topology", TWO_OR_FOUR, ids=str)
def test_prefetch_auto_is_refused(outcome, topology):
    assert 'cannot be "auto"; give a number, such as prefetch=2' in outcome(topology, prefetch_is_auto)


@case(["0", "1", "2", "8"], on=lambda prefetch: TWO_OR_FOUR)
def begins_again_in_short_epochs(here, prefetch):
    """One process discards the batches that it has read ahead. Each epoch is one batch."""
    lanes, sharding = lanes_of([5] * 4), sharding_of("data", here.devices)
    with feedline.Feed(lanes, SIZE, sharding, epochs=40, prefetch=int(prefetch)) as feed:
        batches = []
        for batch in feed:
            batches.append(batch)
            if jax.process_index() == 0 and len(batches) % 7 == 0:
                time.sleep(0.05)  # until it has read ahead what it may
                feed.set_state(feed.get_state())
    return batches


@pytest.mark.parametrize("topology", TWO_OR_FOUR, ids=str)
@pytest.mark.parametrize("prefetch", ["0", "1", "2", "8"])
def test_a_process_that_starts_again_catches_up_over_many_epochs(outcome, topology, prefetch):
    expected = list(epoch_of([5] * 4, SIZE, "drop")) * 40
    assert_holds(outcome(topology, begins_again_in_short_epochs, prefetch), expected)
