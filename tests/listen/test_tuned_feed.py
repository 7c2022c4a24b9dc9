"""Settings that change while a feed runs change no batch, no state and no count, whatever happens in between."""

import itertools
import json
import logging
import multiprocessing
import random
import re
import threading
import time

import grain
import jax
import numpy as np
import pytest
from background import left_behind
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from row_sources import Numbered

import feedline
from feedline import Feed, Limits, Reading, RowError
from feedline._src.listen.listening import FeedListener
from feedline._src.listen.tuning import Tuner
from feedline._src.options import Settings
from feedline._src.run import Stages

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
N, B = 1000, 16
AUTO = {"reading": Reading(threads="auto", buffer="auto"), "prefetch": "auto"}


@pytest.fixture(autouse=True)
def no_thread_is_left(request):
    before = threading.enumerate()
    yield
    if request.node.get_closest_marker("slow"):  # with workers: Grain keeps threads, but no process
        assert not multiprocessing.active_children()
    else:
        assert left_behind(before) == []


@pytest.fixture
def restless(monkeypatch):
    """Proposes random settings to the training thread at random moments, the same ones in each run."""

    def use(seed=0, workers=False, chance=0.3):
        draw, changes = random.Random(seed), []

        def look(self, how):
            pass

        def proposal(self):
            if threading.current_thread() is not threading.main_thread() or draw.random() > chance:
                return None
            settings = Settings(draw.randint(1, 6), 0, draw.randint(1, 5), draw.randint(1, 5))
            if workers and draw.random() < 0.3:
                settings = settings._replace(threads=0, workers=draw.randint(1, 2))
            changes.append(settings)
            return settings

        monkeypatch.setattr(Tuner, "look", look)
        monkeypatch.setattr(Tuner, "proposal", property(proposal, lambda self, value: None), raising=False)
        return changes

    return use


class Columns(Numbered):
    """A source in which a read of row `errors[0]` fails, once for each entry of `errors`."""

    def __init__(self, n=N):
        super().__init__(n, row=np.int32(0), x=np.zeros(5, np.float32))
        self.errors = []

    def read(self, rows, out):
        if self.errors and self.errors[0] in rows:
            raise RowError("disk went away", row=self.errors.pop(0))
        super().read(rows, out)


def stream():
    """A stream whose iterators share a file, as it were: no two of them may read at the same time."""
    reading = threading.Lock()

    def read(i):
        assert reading.acquire(blocking=False)
        time.sleep(2e-3 * (i % B == 5))
        reading.release()
        return {"row": np.int32(i)}

    return grain.MapDataset.range(N).map(read).to_iter_dataset(grain.ReadOptions(0, 0))


def taken(feed, count):
    """The next batches and the state after each, as values that can be compared."""
    found = []
    for batch in itertools.islice(feed, count):
        found.append((jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch), json.dumps(feed.get_state())))
    return found


def assert_same(restless, make, count, changes, *, seed=0, auto=AUTO, **options):
    """Batches, states and counts are the same as in a feed whose settings do not change."""
    with Feed(make(), B, SHARDING, **options) as plain:
        expected, counted = taken(plain, count), plain.statistics()
    made = restless(seed)
    with Feed(make(), B, SHARDING, **options, **auto) as feed:
        assert taken(feed, count) == expected
        found = feed.statistics()
    assert len(made) > changes
    for name in ("batches", "rows", "dropped_rows"):
        assert getattr(found, name) == getattr(counted, name)


OPTIONS = [
    {},
    {"remainder": "pad", "epochs": 2},
    {"remainder": "wrap", "epochs": 3},
    {"steps_per_call": 2},
    {"transform": lambda batch, rows: {**batch, "position": rows.position}},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_batches_states_and_counts_are_those_without_changes(restless, seed):
    assert_same(restless, Columns, 200, 20, seed=seed, **OPTIONS[seed])


def test_records_are_the_same(restless):
    assert_same(restless, lambda: grain.MapDataset.range(N).map(lambda i: {"row": np.int32(i)}), 100, 10, seed=8)


@pytest.mark.parametrize("source", [stream, lambda: feedline.Lanes(lambda lane, count: stream(), 2)])
def test_a_stream_goes_on_where_it_was(restless, source):
    assert_same(restless, source, 60, 4, epochs=3, remainder="pad", auto={"prefetch": "auto"})


@pytest.mark.slow
def test_errors_set_state_and_seek_in_between(restless):
    with Feed(Columns(), B, SHARDING) as plain:
        expected = [batch for batch, _ in taken(plain, 300)]
    restless(5)
    source = Columns()
    with Feed(source, B, SHARDING, **AUTO) as feed:
        draw, found, saved = random.Random(1), [], feed.get_state()
        while len(found) < 300:
            event = draw.random()
            try:
                if event < 0.05:
                    source.errors.append(expected[len(found)]["row"][3])
                elif event < 0.1:
                    feed.set_state(saved)
                    del found[saved["step"] :]
                elif event < 0.15:
                    feed.seek(feed.epoch, feed.position)
                elif event < 0.2:
                    saved = feed.get_state()
                found += [batch for batch, _ in taken(feed, 1)]
            except RowError:
                pass
        assert found == expected


WHERE = [(Stages, "tuned"), (Feed, "_stop"), (FeedListener, "changed")]


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("where", WHERE, ids=lambda where: where[1])
def test_an_interrupt_at_each_point_of_a_change(restless, monkeypatch, where, before):
    with Feed(Columns(), B, SHARDING) as plain:
        expected = [batch for batch, _ in taken(plain, 250)]
    owner, name = where
    whole, draw, armed = getattr(owner, name), random.Random(2), [True]

    def interrupted(self, *arguments, **options):
        strikes = armed[0] and draw.random() < 0.3
        if strikes and before:
            armed[0] = False
            raise KeyboardInterrupt
        result = whole(self, *arguments, **options)
        if strikes:
            armed[0] = False
            raise KeyboardInterrupt
        return result

    changes, found, interrupts = restless(6), [], 0
    with Feed(Columns(), B, SHARDING, **AUTO) as feed:
        monkeypatch.setattr(owner, name, interrupted)
        while len(found) < 250:
            try:
                found += [batch for batch, _ in taken(feed, 1)]
            except KeyboardInterrupt:
                interrupts += 1
            armed[0] = True
        armed[0] = False
        assert found == expected
        monkeypatch.undo()
    assert interrupts > 5
    assert len(changes) > 20


@pytest.mark.slow
def test_workers_come_and_go(restless, tmp_path):
    path = tmp_path / "row.npy"
    np.save(path, np.arange(N, dtype=np.int32))
    with Feed({"row": str(path)}, B, SHARDING) as plain:
        expected = taken(plain, 60)
    changes = restless(3, workers=True, chance=0.15)
    reading = Reading(threads="auto", workers="auto", buffer="auto")
    with Feed({"row": str(path)}, B, SHARDING, reading=reading, prefetch="auto") as feed:
        assert taken(feed, 60) == expected
    assert any(each.workers for each in changes)


class Slow(Columns):
    """A source whose reads sleep for 60 ms a batch. Threads that share a batch share this time."""

    def read(self, rows, out):
        time.sleep(0.06 * len(rows) / B)
        super().read(rows, out)


@pytest.mark.slow
def test_it_finds_threads_and_says_so(caplog):
    caplog.set_level(logging.INFO, "feedline")
    with Feed(Slow(100_000), B, SHARDING, reading=Reading(threads="auto", limits=Limits(cores=2))) as feed:
        deadline = time.monotonic() + 60
        while feed.reading.threads < 4 and time.monotonic() < deadline:
            next(feed)
            time.sleep(0.002)
        assert feed.reading.threads >= 4
        report = feed.report()
    assert report.tuning[0].startswith("tries threads 2 → ")
    assert f"  tuning {report.tuning[0]}" in str(report)
    assert f"tuning {report.tuning[0]}" in caplog.messages


def failing(error):
    def fail(*arguments):
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        feedline.WorkerError("a worker ended"),
        RowError("the network \x1b[1mcannot be reached\nfrom here", stage="read", row=3),
        TypeError("cannot pickle a lock"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_workers_that_tuning_chose_and_that_fail_leave_the_threads_to_read(monkeypatch, tmp_path, error):
    path = tmp_path / "row.npy"
    np.save(path, np.arange(N, dtype=np.int32))
    monkeypatch.setattr("feedline._src.loader.workers.WorkerBatches", failing(error))
    with Feed({"row": str(path)}, B, SHARDING, reading=Reading(workers="auto")) as feed:
        before = taken(feed, 3)
        feed._listener.tuner.proposal = feed._stages.settings._replace(threads=0, workers=2)
        after = taken(feed, 3)
        assert feed.reading.workers == 0
        (sentence,) = feed._listener.tuner.history
        assert sentence.isprintable()
        assert re.fullmatch(rf"goes back to threads \d+: workers failed with {type(error).__name__}: .*", sentence)
    with Feed({"row": str(path)}, B, SHARDING) as plain:
        assert before + after == taken(plain, 6)
    reading = Reading(workers=1, buffer="auto")  # workers that the user asked for are not replaced
    with Feed({"row": str(path)}, B, SHARDING, reading=reading) as feed, pytest.raises(type(error)):
        next(feed)


def test_a_row_that_is_bad_for_threads_too_is_an_error(monkeypatch):
    class Picklable(Columns):
        picklable = True

    source = Picklable()
    monkeypatch.setattr("feedline._src.loader.workers.WorkerBatches", failing(RowError("disk went away")))
    with Feed(source, B, SHARDING, order=feedline.Order(shuffle=False), reading=Reading(workers="auto")) as feed:
        expected = taken(feed, 2)
        while not feed.statistics().ready:  # the threads that will end must have read that row first
            time.sleep(1e-3)
        feed._listener.tuner.proposal = feed._stages.settings._replace(threads=0, workers=2)
        source.errors.append(2 * B + 1)
        with pytest.raises(RowError, match=rf"disk went away \[row {2 * B + 1}\]"):
            next(feed)
        assert feed.reading.workers == 0
        expected += taken(feed, 2)
    assert [int(batch["row"][0]) for batch, _ in expected] == [0, B, 2 * B, 3 * B]


def test_memory_stays_within_what_the_limit_counts(restless):
    """For a while after a change, batches of the earlier settings remain, in buffers of their own."""
    restless(7)
    with Feed(Columns(), B, SHARDING, **AUTO) as feed:
        staging, most = feed._stages.access.buffers.staging, 0
        batch_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in feed.spec.values())
        largest = feed._stages.bounds.host_use(Settings(6, 0, 5, 5)) * batch_bytes
        for _ in range(200):
            next(feed)
            most = max(most, feed.statistics().host_bytes)
            buffer, prefetch = feed.reading.buffer, feed.prefetch
            assert staging.most_idle == buffer + prefetch + 3
        assert 0 < most <= largest


def test_a_move_to_fewer_devices_keeps_to_their_limit():
    limits, half = (
        Limits(device_bytes=10 * 24 * B // 8),
        NamedSharding(Mesh(jax.devices()[:4], ("data",)), P("data")),
    )
    with Feed(Columns(), B, SHARDING, reading=Reading(limits=limits), prefetch="auto") as feed:
        expected = taken(feed, 1)
        feed._listener.tuner.proposal = feed._stages.settings._replace(prefetch=4)
        expected += taken(feed, 1)
        assert feed.prefetch == 4  # at most 10 batches, an eighth of each on a device
        feed.move(half)
        expected += taken(feed, 1)
        assert feed.prefetch == 1  # at most 4 batches, a quarter of each on a device
        assert not feed._listener.tuner._bounds.allow(feed._stages.settings._replace(prefetch=2))
    with Feed(Columns(), B, SHARDING) as plain:
        assert taken(plain, 3) == expected


@pytest.mark.parametrize(
    ("reading", "prefetch", "found"),
    [
        (
            {"threads": "auto", "buffer": "auto", "limits": Limits(host_bytes=384 * 9, cores=1)},
            "auto",
            (1, 0, 1, 2),
        ),
        ({"threads": "auto", "buffer": "auto"}, 0, (0, 0, 2, 0)),  # nothing is tuned
        ({"threads": 2, "workers": "auto"}, 2, (2, 0, 2, 2)),  # no workers for a source in memory
    ],
)
def test_what_a_feed_begins_with(reading, prefetch, found):
    with Feed(Columns(), B, SHARDING, reading=Reading(**reading), prefetch=prefetch) as feed:
        next(feed)
        assert (feed.reading.threads, feed.reading.workers, feed.reading.buffer, feed.prefetch) == found
        assert (feed._listener.tuner is None) == (prefetch == 0)


def test_limits_need_a_setting_to_find():
    reading = Reading(threads=4, buffer=2, limits=Limits(host_bytes=1 << 30))
    with pytest.raises(
        ValueError, match=r'^Reading\.limits holds for settings that are "auto", and none is; leave '
    ):
        Feed(Columns(), B, SHARDING, reading=reading, prefetch=4)


def test_a_feed_that_replaces_bad_rows_keeps_its_threads(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((64, 2), np.float32))
    for bad_rows, found in (("raise", {"threads", "workers"}), ("substitute", {"threads"})):
        reading = Reading(threads="auto", workers="auto", bad_rows=bad_rows)
        with Feed(tmp_path / "x.npy", 8, jax.devices()[0], reading=reading) as feed:
            assert feed._stages.bounds.tunable == found
