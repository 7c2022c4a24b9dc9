"""Pure functions that judge what limits a feed, and which setting to change, from times of its latest batches."""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from feedline._src.listen.accounts import Window
from feedline._src.listen.report import LITTLE, Bound, Change, Report, Straggler
from feedline._src.listen.words import STAGES, factor, milliseconds, percent
from feedline._src.options import DEFAULT_MAX_THREADS, Settings

_STRAGGLER_FACTOR = 1.2  # clearly slower: input takes longer than this × the median of the others
_MAX_GIL_WAIT_S = 1e-3  # longer waits mean that Python threads compete for the GIL (switch interval: 5 ms)
_MIN_CPU_S = 2e-3  # threads that need less processor time per batch cannot hold the GIL for long
_MOSTLY = 0.5
_MAX_REMAINING_WAIT = 0.9  # a change is advised if it is predicted to leave less than this share of the wait
_MAX_BATCHES = 32  # the largest buffer, and the largest prefetch, that is advised
_PER_STAGE: tuple[Bound, ...] = ("read", "host", "place")


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """The latest batches of a feed, the machine, and settings: the present ones, or others to be judged.

    Attributes:
      stream: whether the source is a stream, which one thread reads.
      gil_wait_s: how long a thread that released the GIL waits for the GIL or for a processor.
      found: the names of the settings that are "auto"; advice leaves them out.
      searching: whether the feed is still searching for better values of `found`.
    """

    window: Window
    settings: Settings
    cores: int
    stream: bool = False
    gil_wait_s: float = 0.0
    may_use_workers: bool = False
    process: int = 0
    found: frozenset[str] = frozenset()
    searching: bool = False

    @property
    def reader(self) -> Literal["threads", "workers", "stream", "caller"]:
        """Who reads: reading threads, worker processes, the thread of a stream, or the caller of `next`."""
        if not self.settings.prefetch:
            return "caller"
        return "stream" if self.stream else "workers" if self.settings.workers else "threads"

    @property
    def readers(self) -> int:
        """Number of threads or processes that make batches concurrently."""
        return {"threads": max(1, self.settings.threads), "workers": self.settings.workers}.get(self.reader, 1)

    @property
    def parts(self) -> int:
        """The number of parts into which threads split a batch. Each part is one call of source and transform."""
        return math.ceil(self.readers / self.settings.buffer) if self.reader == "threads" else 1

    @property
    def stages_s(self) -> dict[str, float]:
        """For each stage, its thread-seconds per batch."""
        return {name: self.window.mean(f"{name}_s") for name in _PER_STAGE}

    def batch_s(self, stages_s: Mapping[str, float]) -> dict[tuple[Bound, ...], float]:
        """{stages that the same threads carry out in turn: their time per batch}. The largest is that of input."""
        made: tuple[Bound, ...] = ("read", "host") if self.reader == "workers" else _PER_STAGE
        placed_at_a_time = 1 if self.reader == "workers" else max(1, self.settings.prefetch)
        made_s = sum(stages_s.get(name, 0.0) for name in made) / self.readers
        return {made: made_s, ("place",): stages_s.get("place", 0.0) / placed_at_a_time}

    @property
    def shares_gil(self) -> bool:
        """Whether the feed's threads take turns because their own Python code holds the GIL.

        False if they wait longer than they compute: then other threads hold the GIL, or processors are busy.
        """
        computes = self.window.mean("cpu_s") > max(_MIN_CPU_S, self.gil_wait_s)
        return self.reader == "threads" and self.gil_wait_s > _MAX_GIL_WAIT_S and computes

    @property
    def lost_s(self) -> float:
        """The time per step that the loop loses: its wait for a batch, and for the GIL if `shares_gil`."""
        gil_s = min(self.gil_wait_s, self.window.loop_s) if self.shares_gil else 0.0
        return self.window.wait_s + gil_s

    def having(self, **settings: int) -> Circumstances:
        return dataclasses.replace(self, settings=self.settings._replace(**settings))


class ProcessTimes(NamedTuple):
    """Mean times per batch in one process, and its own verdict, which it publishes to the other processes.

    Attributes:
      stages_s: thread-seconds of "read", "host" and "place".
      input_s: the time per batch if nothing but input limited this process.
      wait_share, bound: of this process alone.
      limits: the stages that make its loop wait in `next`; empty: none do.
    """

    process: int
    stages_s: Mapping[str, float]
    input_s: float
    wait_share: float
    bound: Bound
    limits: Sequence[Bound]

    @classmethod
    def of(cls, how: Circumstances) -> ProcessTimes:
        input_s = max(how.batch_s(how.stages_s).values())
        return cls(how.process, how.stages_s, input_s, how.window.wait_share, *_bound(how))


def judge(how: Circumstances, others: Sequence[ProcessTimes] = (), tuning: Sequence[str] = ()) -> Report:
    """The report on a feed. `others`: with several processes, the times of each, also of this one."""
    window, slow, own = how.window, straggler(others), ProcessTimes.of(how)
    longest = max([own, *others], key=lambda each: each.wait_share)
    # if only others wait for input, this process waits for them inside its step
    limited = longest if own.wait_share < LITTLE <= longest.wait_share else own
    bound, blamed = limited.bound, (limited if slow is None else slow).process
    compute_s = max(1e-9, window.loop_s - window.late_s)
    # for each stage, the time between two batches if there were no other stage
    alone_s = {name: max(how.batch_s({name: seconds}).values()) for name, seconds in how.stages_s.items()}
    if own.bound == "place" and not own.limits:  # transfers are slower than the loop
        alone_s["place"] = max(alone_s["place"], window.loop_s)
    headroom = {name: compute_s / max(1e-9, seconds) for name, seconds in alone_s.items()}
    headroom["compute"] = window.period_s / compute_s
    change = None
    if blamed != how.process:
        advice = f"look at process {blamed}: its own report says what to change"
    else:
        if bound in _PER_STAGE and window.wait_s >= window.late_s:
            best = best_settings(how, {*Settings._fields} - how.found)
            change = None if best is None else Change.of(how.settings, *best)
        advice = _advice(bound if slow is None else slow.stage, change, how, headroom)
    return Report(
        bound=bound if slow is None else "straggler",
        au=min(window.au, 1 - longest.wait_share),
        wait_share=longest.wait_share,
        headroom=headroom,
        advice=advice,
        change=change,
        step_s=window.period_s,
        loop_s=window.loop_s,
        wait_s=window.wait_s,
        late_s=window.late_s,
        stages_s={name: window.mean(f"{name}_s") for name in ("read", "transform", "stage", "place")},
        cpu_s=window.mean("cpu_s"),
        batches=len(window.batches),
        process=how.process,
        straggler=slow,
        settings=how.settings._asdict(),
        tuning=tuning,
        idle_s=window.idle_s,
    )


def straggler(processes: Sequence[ProcessTimes]) -> Straggler | None:
    """The slowest of the processes that input limits. None if it is hardly slower, and another waits, too."""
    slowest = max((each for each in processes if each.limits), key=lambda each: each.input_s, default=None)
    if slowest is None or len(processes) < 2:
        return None
    others = [each for each in processes if each is not slowest]
    usual_s = statistics.median(each.input_s for each in others)
    if slowest.input_s < _STRAGGLER_FACTOR * usual_s and any(each.wait_share >= LITTLE for each in others):
        return None
    usually_s = {stage: statistics.median(each.stages_s[stage] for each in others) for stage in _PER_STAGE}
    stage = max(slowest.limits, key=lambda name: slowest.stages_s[name] - usually_s[name])
    return Straggler(slowest.process, stage, slowest.stages_s[stage], usually_s[stage])


def predicted_wait_s(now: Circumstances, then: Circumstances) -> float:
    """Predict the mean wait for a batch in the circumstances `then`: the largest of three waits. If batches are
    read ahead, the loop's own time is subtracted from the first two.

    - Threads: the largest `batch_s`.
    - Processors: the processor time of a batch ÷ cores, or all of it if Python code shares the GIL.
    - Uneven batches: see `_uneven_wait_s`. A slow batch makes the loop wait once no batch is ahead.
    """
    window = now.window
    make_s = [batch.read_s + batch.host_s for batch in window.batches]
    loop_s, place_s, cpu_s = window.loop_s, window.mean("place_s"), window.mean("cpu_s")
    if now.shares_gil and then.reader == "workers":  # with workers, neither they nor the loop wait for the GIL
        make_s = [batch.read_cpu_s + batch.host_cpu_s for batch in window.batches]
        loop_s = max(0.0, loop_s - now.gil_wait_s)
    mean_s = statistics.fmean(make_s)
    cpu_s /= 1 if then.shares_gil else then.cores
    if then.reader == "caller":
        return max(mean_s + place_s, cpu_s)
    each_s = max(then.batch_s({"read": mean_s, "place": place_s}).values())
    readers, ahead = math.ceil(then.readers / then.parts), then.settings.ahead(then.stream)
    uneven_s = _uneven_wait_s([each / then.parts for each in make_s], loop_s, readers, ahead)
    return max(0.0, each_s - loop_s, cpu_s - loop_s, uneven_s)


def _uneven_wait_s(make_s: Sequence[float], loop_s: float, readers: int, ahead: int) -> float:
    """The mean wait for slow batches. 0 if even the slowest batch is in time, or if the average batch is late.

    Batches begin in order. Batch i takes `make_s[i]`, and begins once a reader is free and the loop has taken
    batch i - `ahead`.
    """
    if not statistics.fmean(make_s) <= readers * loop_s < max(make_s):
        return 0.0
    free, taken = [-math.inf] * readers, [-loop_s]  # when readers are free, and when batches -1, 0, … are taken
    for i, each in enumerate(make_s):
        begun = taken[i - ahead + 1] if i >= ahead else (i - ahead) * loop_s
        ready = max(begun, free[0]) + each
        heapq.heapreplace(free, ready)
        taken.append(max(ready, taken[-1] + loop_s))
    return (taken[-1] + loop_s) / len(make_s) - loop_s


def _bound(how: Circumstances) -> tuple[Bound, Sequence[Bound]]:
    """What limits training; and the stages that make the loop wait in `next`, if any do."""
    window, pools_s = how.window, how.batch_s(how.stages_s)
    slowest = max(pools_s, key=pools_s.__getitem__)
    if window.wait_share < LITTLE:
        return "loop" if (window.idle_s or 0.0) > _MOSTLY * window.loop_s else "compute", ()
    if window.late_s > window.wait_s:
        return "place", ()
    if how.reader != "caller" and pools_s[slowest] < window.loop_s:  # the loop waits, although input is faster
        waits_for_gil = how.gil_wait_s > _MAX_GIL_WAIT_S and not how.shares_gil
        if waits_for_gil or predicted_wait_s(how, how) < _MOSTLY * window.wait_s:
            return "machine", ()
        slowest = next(iter(pools_s))  # some batches take long, or processors or the GIL are short
        return max(slowest, key=lambda name: max(getattr(batch, f"{name}_s") for batch in window.batches)), slowest
    return max(slowest, key=how.stages_s.__getitem__), slowest


def best_settings(
    how: Circumstances,
    changeable: Collection[str],
    may_try: Callable[[Settings], bool] = lambda settings: True,
    max_threads: int = DEFAULT_MAX_THREADS,
) -> tuple[Settings, float] | None:
    """The settings with which the loop is predicted to wait least, and the predicted wait share.

    Of equally good settings, the first. None: no change helps. `changeable`: names of settings that may change.
    """
    window = how.window
    changes = [then for then in _changes(how, changeable, may_try, max_threads) if may_try(then.settings)]
    waits_s = [predicted_wait_s(how, then) for then in changes]
    enough_s = max(1.02 * min(waits_s, default=0.0), 0.02 * window.loop_s)
    now_s = predicted_wait_s(how, how)
    for then, wait_s in zip(changes, waits_s, strict=True):
        if wait_s <= enough_s:
            if wait_s >= _MAX_REMAINING_WAIT * now_s:
                return None
            wait_s *= window.wait_s / now_s
            return then.settings, min(1.0, (wait_s + window.late_s) / (wait_s + window.loop_s))
    return None


def _changes(
    how: Circumstances, changeable: Collection[str], may_try: Callable[[Settings], bool], max_threads: int
) -> Iterator[Circumstances]:
    """The changes that may help; for each setting, the smallest change first."""
    now, window = how.settings, how.window
    if how.reader == "caller":
        if "prefetch" in changeable:
            yield how.having(threads=min(max(how.cores, 2), DEFAULT_MAX_THREADS), prefetch=2)
        return
    for name in ("prefetch",) if how.stream else ("buffer", "prefetch"):
        size = 2 * getattr(now, name)
        while name in changeable and size <= _MAX_BATCHES:
            yield how.having(**{name: size})
            size *= 2
    if "threads" in changeable and how.reader == "threads" and not how.shares_gil:
        # to keep up with the loop, this many batches must be placed at a time, and each needs a slot
        slots = min(_MAX_BATCHES, math.ceil(window.mean("place_s") / max(1e-9, window.loop_s)))
        for n in range(how.readers + 1, max_threads + 1):
            # the buffer grows with the threads, so that batches are not split into more parts
            buffer = min(_MAX_BATCHES, math.ceil(n / how.parts))
            sizes = {"buffer": max(now.buffer, buffer), "prefetch": max(now.prefetch, slots)}
            then = how.having(threads=n, **{name: sizes[name] for name in sizes if name in changeable})
            yield then if may_try(then.settings) else how.having(threads=n)
    if "workers" in changeable and (how.reader == "workers" or (how.may_use_workers and how.shares_gil)):
        for n in range(now.workers + 1, max(how.cores, now.workers + 1) + 1):
            yield how.having(threads=0, workers=n)


def _advice(bound: str, change: Change | None, how: Circumstances, headroom: Mapping[str, float]) -> str:
    window = how.window
    if bound == "machine":
        return (
            f"no setting helps: end other programs on these {how.cores} cores, and use processes in place of your "
            f"own threads that compute in Python. A thread waits {milliseconds(how.gil_wait_s)} ms for the GIL, "
            f"and a batch needs only {milliseconds(window.mean('cpu_s'))} ms of processor time"
        )
    if bound == "loop":
        return (
            "nothing to change in the feed: log, save and fetch values less often, or on another thread, so that "
            "the next step is dispatched before this one ends"
        )
    if bound == "compute":
        stage = min(_PER_STAGE, key=headroom.__getitem__)
        return (
            f"nothing to change: input could be {factor(headroom[stage])} times as fast as the loop "
            f"({STAGES[stage]} would be the next limit); to train faster, make the step faster"
        )
    if change is not None:
        return f"{change}: wait {percent(window.wait_share)} → {percent(change.wait_share)}"
    if how.searching:
        return f"nothing yet: better values of {', '.join(sorted(how.found))} are being looked for"
    prefetch = how.settings.prefetch
    if window.late_s > window.wait_s and prefetch < 2 and "prefetch" not in how.found:
        return f"prefetch {prefetch} → 2: transfers overlap with the step only if two batches are placed ahead"
    return f"no setting helps: {_remedy(bound, how)}"


def _remedy(bound: str, how: Circumstances) -> str:
    """What to do if no setting helps."""
    spent_s, cpu_s = how.window.mean(f"{bound}_s"), how.window.mean(f"{bound}_cpu_s")
    if bound == "place":
        return "ship fewer bytes (uint8 or bfloat16, converted in the step), and fewer, larger leaves"
    if how.stream:
        return (
            "one thread reads a stream; give a Grain dataset workers, or more of them, by mp_prefetch, or use a "
            "source with random access, which several threads can read"
        )
    if bound == "read" and cpu_s < 0.5 * spent_s:
        return (
            "reading waits for storage, the network or a lock. For files: read neighbouring rows together, "
            "Order(shuffle=Blocks(...)), or use a faster disk or memory. For a store: a larger cache on "
            "local disk, feedline.Store(cache_bytes=...). For Python that holds the GIL: Reading(workers=...)"
        )
    if how.shares_gil:
        return (
            f"{STAGES[bound]} holds the GIL, so threads take turns; use NumPy calls on whole batches, or write "
            "rows to a file, so that Reading(workers=...) can be used"
        )
    return (
        f"{STAGES[bound]} needs {milliseconds(cpu_s)} ms of processor time a batch on {how.cores} cores; make it "
        "cheaper, do it once and save the result, or do it in the step"
    )
