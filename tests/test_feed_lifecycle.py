"""After errors, interrupts and close, a feed has lost no batch and left no thread."""

import contextlib
import copy
import functools
import gc
import pickle
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from background import PATIENCE_S, arrived, is_collected, left_behind, spawn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from row_sources import Numbered

from feedline import Feed, FeedError, Order, Reading, RowError
from feedline._src.loader.random_access import LocalBatches
from feedline._src.order.epoch import rows_at
from feedline._src.prefetch.pipelines import Prefetcher, Synchronous
from feedline._src.prefetch.watch import Watch

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
PACKAGE = str(Path(Feed.__init__.__code__.co_filename).parent)

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
N, B = 64, 8
ORDER = rows_at(Order(), N, 0, np.arange(N)).reshape(-1, B).tolist()
CLOSED = "the feed is closed; to continue, build a new feed and call its set_state"
ELSEWHERE = "an iterator of batches is for one thread at a time, and another thread is inside it"


class Rows(Numbered):
    """A row source whose reads of one row can be made to wait or to fail."""

    def __init__(self, *, row=ORDER[3][5]):
        super().__init__(N, row=np.int32())
        self.row = row
        self.errors = []
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()
        self.threads = set()

    def read(self, rows, out):
        self.threads.add(threading.current_thread().name)
        if self.row in rows:
            self.inside.set()
            arrived(self.gate)
            if self.errors:
                raise self.errors.pop()
        super().read(rows, out)


def feed_of(source, **options):
    return Feed(source, B, SHARDING, **{"epochs": 1, **options})


def rows_in(batch):
    return np.asarray(batch["row"]).tolist()


READINGS = [
    pytest.param({"prefetch": prefetch, "reading": Reading(threads=threads)}, id=f"{prefetch}-{threads}")
    for prefetch, threads in [(0, 0), (1, 0), (2, 1), (2, 3), (20, 2)]
]


@pytest.mark.parametrize("options", READINGS)
@pytest.mark.parametrize("batch", [0, 3, 7])
def test_after_an_error_next_reads_again_from_the_batch_that_failed(options, batch):
    source = Rows(row=ORDER[batch][2])
    source.errors = [OSError("once")]  # raised once, so the search for the bad row finds none
    with feed_of(source, **options) as feed:
        delivered = [rows_in(next(feed)) for _ in range(batch)]
        for told in ("first of them .*, with OSError: once", r"disk went away \[row"):
            with pytest.raises(RowError, match=told):
                next(feed)
            assert (feed.get_state()["step"], feed.position) == (batch, batch * B)
            source.errors = [RowError("disk went away", row=source.row)] if "once" in told else []
        assert delivered + [rows_in(batch) for batch in feed] == ORDER
        assert feed.statistics().batches == 8


def test_an_error_in_the_transform_is_the_users_own():
    def transform(batch, rows):
        if failing and ORDER[3][5] in rows.index:
            failing.clear()
            raise ZeroDivisionError("in the crop")
        return batch

    failing = [True]
    with feed_of(Rows(), transform=transform, reading=Reading(threads=1)) as feed:
        delivered = [rows_in(next(feed)) for _ in range(3)]
        with pytest.raises(ZeroDivisionError, match="in the crop") as caught:
            next(feed)
        assert any(entry.name == "transform" for entry in caught.traceback)
        assert "feedline: in the transform, at epoch 0, position 24" in caught.value.__notes__
        assert delivered + [rows_in(batch) for batch in feed] == ORDER


@contextlib.contextmanager
def sigint_once(after, hits=lambda frame: True):
    """A context that ends by one SIGINT: once `after` is set, at a frame of this thread that `hits` accepts."""
    came = threading.Event()

    def handler(number, frame):
        if hits(frame) and not came.is_set():
            came.set()
            raise KeyboardInterrupt

    def interrupt():
        arrived(after)
        while not came.wait(0.1):  # repeated: a signal right before Python begins to wait is not handled at once
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    usual, interrupting = signal.signal(signal.SIGINT, handler), spawn(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        interrupting.result(PATIENCE_S)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_signal_while_next_waits_loses_nothing(monkeypatch):
    source, waits = Rows(), threading.Event()
    source.gate.clear()
    with feed_of(source) as feed:
        delivered = [rows_in(next(feed)) for _ in range(3)]
        monkeypatch.setattr(Watch, "waits", lambda watch, begin=Watch.waits: waits.set() or begin(watch))
        with sigint_once(waits):
            next(feed)
        assert feed.get_state()["step"] == 3
        source.gate.set()
        assert delivered + [rows_in(batch) for batch in feed] == ORDER


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt at a chosen line."""


def interrupted_at(line, function, counts=lambda: True):
    """Call `function`, and raise `Interrupted` at the `line`-th line that it runs in feedline, if there is one.

    Lines count only while `counts` returns true.

    Returns (name of the interrupted function, None), or (None, what `function` returned).
    """
    seen, where = 0, None

    def trace(frame, event, _):
        nonlocal seen, where
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and counts():
            seen += 1
            if seen == line:
                where = frame.f_code.co_name
                sys.settrace(None)
                raise Interrupted
        return trace

    def traced():
        gc.disable()  # a collection could run finalizers of other tests, where Python only prints what is raised
        sys.settrace(trace)
        try:
            found = None, function()
        except Interrupted:
            found = where, None
        finally:
            sys.settrace(None)
            gc.enable()
        yield found

    # otherwise Python may go on treating an old exception as being handled; a generator limits this to itself
    return next(traced())


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_at_any_line_of_next_loses_nothing(prefetch):
    """Interrupts `next` once at each line that it executes for a batch in the middle of a pass."""
    interrupted = []
    # batches that became ready out of order take more lines, so one round may miss the last lines
    for _ in range(20):
        for line in range(1, 1000):
            where = _interrupted_next(line, prefetch)
            if where is None:
                break
            interrupted.append(where)
        if {"__enter__", "__exit__", "take"} <= set(interrupted):
            break
    assert interrupted.count("_next") > 5
    assert {"__enter__", "__exit__", "take"} <= set(interrupted)


def _interrupted_next(line, prefetch):
    """Interrupt the third `next` at a line, and read to the end. Returns where; None if there is no such line."""
    with feed_of(Rows(), prefetch=prefetch, reading=Reading(threads=1)) as feed:
        delivered = [rows_in(next(feed)), rows_in(next(feed))]
        until = time.monotonic() + PATIENCE_S
        while feed.statistics().ready < prefetch and time.monotonic() < until:
            time.sleep(1e-4)
        where, batch = interrupted_at(line, lambda: next(feed))
        step = feed.get_state()["step"]
        assert feed.statistics().batches == step
        if step == 3 and where:  # an interrupt right after the delivery counts as one after `next`
            assert where in ("__next__", "_next", "__exit__")
            delivered.append(ORDER[2])
        elif batch:
            delivered.append(rows_in(batch))
        assert delivered + [rows_in(batch) for batch in feed] == ORDER
        return where


@pytest.mark.slow
@pytest.mark.parametrize("method", ["take", "start"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_second_interrupt_at_any_line_after_the_first_loses_nothing(prefetch, method, monkeypatch):
    """The first one comes right after a batch is taken from the pipeline, or before the threads are started."""
    kind = Prefetcher if prefetch else Synchronous
    came, usual = [], getattr(kind, method)

    def interrupted(pipeline):
        if method == "take":
            usual(pipeline)
        monkeypatch.setattr(kind, method, usual)
        came.append(True)
        raise Interrupted

    for line in range(1, 1000):
        with feed_of(Rows(), prefetch=prefetch, reading=Reading(threads=1)) as feed:
            before = threading.enumerate()
            delivered = [rows_in(next(feed)), rows_in(next(feed))] if method == "take" else []
            came.clear()
            monkeypatch.setattr(kind, method, interrupted)
            where, _ = interrupted_at(line, lambda: next(feed), counts=lambda: came)
            assert came
            given_up = {thread for thread in threading.enumerate() if thread not in before}
            delivered += [rows_in(next(feed)), rows_in(next(feed))]
            assert left_behind(set(threading.enumerate()) - given_up) == []
            assert delivered + [rows_in(batch) for batch in feed] == ORDER
        if where is None:
            break
    assert 10 < line < 999


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_first_next_leaves_nothing_held():
    """The first `next` maps memory. A lock that stayed held would block the next batch for ever."""
    for line in range(1, 2000):
        with feed_of(Rows(), prefetch=0) as feed:
            where, batch = interrupted_at(line, lambda: next(feed))
            delivered = [rows_in(batch)] if batch else ORDER[: feed.get_state()["step"]]
            assert delivered + [rows_in(batch) for batch in feed] == ORDER
        if where is None:
            break
    assert 100 < line < 1999


@pytest.mark.slow
@pytest.mark.parametrize("move", ["seek", "set_state"])
def test_an_interrupt_at_any_line_of_a_move_leaves_it_done_or_undone(move):
    for line in range(1, 1000):
        with feed_of(Rows()) as feed:
            start = feed.get_state()
            [next(feed) for _ in range(8)]
            assert next(feed, "end") == "end"
            argument = 0 if move == "seek" else start
            where, _ = interrupted_at(line, functools.partial(getattr(feed, move), argument))
            if feed.position:
                assert next(feed, "end") == "end"
            else:
                assert [rows_in(batch) for batch in feed] == ORDER
        if where is None:
            break
    assert line > 10


def test_two_threads_in_one_feed_are_refused_and_the_feed_stays_usable(monkeypatch):
    source, waits = Rows(), threading.Event()
    source.gate.clear()
    with feed_of(source) as feed:
        delivered = [rows_in(next(feed)) for _ in range(3)]
        monkeypatch.setattr(Watch, "waits", lambda watch, begin=Watch.waits: waits.set() or begin(watch))
        waiting = spawn(lambda: rows_in(next(feed)))
        arrived(waits)
        state = feed.get_state()  # looking is fine
        assert (feed.epoch, feed.position, feed.statistics().batches) == (0, 24, 3)
        for call in (lambda: next(feed), lambda: feed.seek(0), lambda: feed.set_state(state)):
            with pytest.raises(ValueError, match=ELSEWHERE):
                call()
        source.gate.set()
        delivered.append(waiting.result(PATIENCE_S))
        assert delivered + [rows_in(batch) for batch in feed] == ORDER


def test_a_closed_feed_refuses_everything_but_a_look():
    feed = feed_of(Rows())
    first = rows_in(next(feed))
    feed.close()
    feed.close()
    state = feed.get_state()
    for call in (lambda: next(feed), lambda: iter(feed), lambda: feed.seek(0), lambda: feed.set_state(state)):
        with pytest.raises(ValueError, match=CLOSED):
            call()
    assert (len(feed), feed.epoch, feed.position, feed.statistics().batches) == (8, 0, 8, 1)
    with feed_of(Rows()) as another:
        another.set_state(state)
        assert [first] + [rows_in(batch) for batch in another] == ORDER


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_feed_is_neither_copied_nor_pickled(way):
    with feed_of(Rows()) as feed:
        first = rows_in(next(feed))
        with pytest.raises(TypeError, match=r"pickled nor copied, .* set_state with this feed's get_state"):
            way(feed)
        assert [first] + [rows_in(batch) for batch in feed] == ORDER


def test_close_while_another_thread_waits_in_next():
    source = Rows()
    source.gate.clear()
    feed = feed_of(source)
    delivered = [rows_in(next(feed)) for _ in range(3)]
    waiting = spawn(lambda: next(feed))
    arrived(source.inside)
    closing = spawn(feed.close)
    with pytest.raises(ValueError, match=CLOSED):
        waiting.result(PATIENCE_S)  # at once: the read is still stuck
    source.gate.set()
    closing.result(PATIENCE_S)
    assert feed.get_state()["step"] == len(delivered) == 3


def test_after_an_interrupt_close_waits_for_reads_again():
    """Before Python 3.13, a thread whose `join` was interrupted looked as if it had ended."""
    source = Rows()
    source.gate.clear()
    feed = feed_of(source, reading=Reading(threads=1))
    [next(feed) for _ in range(3)]
    joins = "_wait_for_tstate_lock"  # of Python before 3.13
    with sigint_once(source.inside, lambda at: at.f_code.co_name == joins or sys.version_info >= (3, 13)):
        feed.close()
    closing = spawn(lambda: feed.close(float("inf")))
    with pytest.raises(TimeoutError):
        closing.result(0.2)
    source.gate.set()
    closing.result(PATIENCE_S)


def test_close_while_another_thread_is_about_to_start_the_run(monkeypatch):
    """`close` comes after `next` has found the feed open, and before the first read."""
    about, go_on = threading.Event(), threading.Event()

    def start(run, start=Prefetcher.start):
        about.set()
        arrived(go_on)
        start(run)

    monkeypatch.setattr(Prefetcher, "start", start)
    feed = feed_of(Rows())
    waiting = spawn(lambda: next(feed))
    arrived(about)
    feed.close()
    go_on.set()
    with pytest.raises(ValueError, match=CLOSED):
        waiting.result(PATIENCE_S)


def test_many_threads_may_close_at_once():
    feed = feed_of(Rows(), epochs=None)
    next(feed)
    start = threading.Barrier(8)
    for closing in [spawn(lambda: (start.wait(PATIENCE_S), feed.close())) for _ in range(8)]:
        closing.result(PATIENCE_S)


@pytest.mark.parametrize("way", ["end", "error", "seek", "close"])
def test_every_end_of_a_run_ends_its_threads(way):
    before = threading.enumerate()
    source = Rows()
    feed = feed_of(source, reading=Reading(threads=3))
    if way == "end":
        assert len(list(feed)) == 8
    elif way == "error":
        source.errors = [FeedError("disk")]
        with pytest.raises(FeedError, match="disk"):
            list(feed)
    else:
        next(feed)
        assert [thread.is_alive() for thread in feed._run._threads] == [True] * (3 + 2)
        feed.seek(0) if way == "seek" else feed.close()
    assert left_behind(before) == []
    feed.close()


def test_threads_that_close_the_feed_in_its_transform_do_not_wait_for_each_other(caplog):
    both = threading.Barrier(2)

    def transform(batch, rows):
        if len(rows.index) > 1:  # not the call with one row while the feed is built
            both.wait(PATIENCE_S)
            feed.close(timeout_s=4 * PATIENCE_S)
        return batch

    feed = feed_of(Rows(), transform=transform, reading=Reading(threads=2))
    began = time.monotonic()
    with pytest.raises(ValueError, match=CLOSED):
        next(feed)
    feed.close()
    assert time.monotonic() - began < 2 * PATIENCE_S
    assert caplog.records == []  # no thread was waited for, so none is called stuck


@pytest.mark.parametrize("cycle", [False, True])
def test_a_feed_that_is_dropped_ends_its_threads(cycle):
    before = threading.enumerate()
    feed = feed_of(Rows(), epochs=None)
    batch = next(feed)
    if cycle:
        feed.myself = feed
    dropped = weakref.ref(feed)
    del feed
    assert is_collected(dropped)
    assert left_behind(before) == []
    assert rows_in(batch) == ORDER[0]


def test_without_prefetch_the_caller_does_everything():
    before = set(threading.enumerate())
    source = Rows()
    with feed_of(source, prefetch=0, reading=Reading(threads=4)) as feed:
        for batch in feed:
            assert [thread.name for thread in set(threading.enumerate()) - before] == []
            assert batch["row"].shape == (B,)
        assert feed.statistics().threads == 0
    assert source.threads == {threading.current_thread().name}
    assert set(threading.enumerate()) <= before


@contextlib.contextmanager
def profiled(profile):
    """A context in which `profile` is told of all calls on this thread, and on threads that start there."""
    gc.disable()  # a collection's calls would count, too
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


def test_taking_a_ready_batch_costs_the_same_calls_whatever_is_in_it():
    """Counted, not timed: the calls of Python and C functions in one `next`."""

    def calls(leaves, batch_size):
        source = {f"x{i}": np.zeros((4 * batch_size, 16), np.float32) for i in range(leaves)}
        with Feed(source, batch_size, SHARDING, epochs=1, prefetch=9, reading=Reading(threads=1)) as feed:
            next(feed)
            for thread in feed._run._threads:
                thread.join(PATIENCE_S)  # until all batches are placed
            assert feed.statistics().ready == 3
            count = 0

            def profile(frame, event, _):
                nonlocal count
                count += event in ("call", "c_call")

            with profiled(profile):
                next(feed)
            return count

    counts = [calls(1, 8), calls(1, 4096), calls(20, 8)]
    assert max(counts) < 60
    assert max(counts) - min(counts) < 10  # batches that became ready out of order take some more


ARRAYS, RECORDS = {"x": np.zeros((4096, 2), np.float32)}, grain.MapDataset.range(4096).map(np.float32)


@pytest.mark.parametrize(
    ("most", "source", "transform"),
    [(14, ARRAYS, None), (13, RECORDS.to_iter_dataset(), None), (16, RECORDS, None), (19, ARRAYS, lambda x, _: x)],
    ids=["arrays", "stream", "records", "transform"],
)
def test_a_batch_passes_few_files(most, source, transform):
    """Counts the files of feedline with functions that run while batches are delivered, on any thread."""
    files, options = set(), {"epochs": None, "transform": transform}
    with profiled(lambda at, *_: files.add(at.f_code.co_filename)), feed_of(source, **options) as feed:
        for number in range(60):
            if number == 20:  # by then, no thread computes what it keeps for the whole epoch
                files.clear()
            next(feed)
        passed = [file for file in sorted(files) if file.startswith(PACKAGE)]
    assert len(passed) <= most, passed


def test_runs_that_were_given_up_are_let_go_of(monkeypatch):
    """Also runs that hold memory of unfinished batches: more threads read than batches may be read ahead."""
    runs = weakref.WeakSet()
    made = LocalBatches.__init__
    monkeypatch.setattr(LocalBatches, "__init__", lambda self, *given: runs.add(self) or made(self, *given))
    with feed_of(Rows(), epochs=None, reading=Reading(threads=5, buffer=2)) as feed:
        gc.disable()  # reference counts alone must free the runs
        try:
            for _ in range(12):
                next(feed)
                feed.seek(0)
            until = time.monotonic() + PATIENCE_S
            while len(runs) and time.monotonic() < until:  # until reads in progress have ended
                time.sleep(0.01)
                feed.seek(0)  # lets go of runs whose reads have ended since
            assert not runs
        finally:
            gc.enable()
