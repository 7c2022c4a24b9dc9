"""Judges what limits a feed, and which setting to change, from the times of its latest batches. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from feedline._src.listen.accounting import BatchTimes
from feedline._src.listen.model import Costs, Setting, simulated_wait_s
from feedline._src.listen.report import Bound, Change, Report, Straggler
from feedline._src.listen.window import Window
from feedline._src.listen.words import STAGES, factor, milliseconds, percent
from feedline._src.options import Settings

Reader = Literal["threads", "workers", "stream", "caller"]
LITTLE = 0.05
"""A share of waiting below which training counts as limited by compute, as in XProf."""
_STRAGGLER_FACTOR = 1.2
"""A straggler's input takes longer than this × the median of the others."""
_MAX_GIL_WAIT_S = 1e-3
"""Longer waits mean that Python is competing for the GIL (switch interval: 5 ms), or programs for processors."""
_MIN_CPU_S = 2e-3
"""Threads that need less processor time a batch cannot hold the GIL for long."""
_MOSTLY = 0.5
_CLEARLY = 0.9
"""A change is advised if it brings the loop's waits below this share of what they are."""
_MAX_THREADS = 16
_MAX_BATCHES = 32


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """How a feed works, and on what.

    Attributes:
      reader: what makes batches in host memory: "threads", "workers", the one thread of a "stream", or the
        "caller".
      threads, workers, buffer, prefetch: as in `Reading` and `Feed`.
      cores: that this process may use.
      lock_wait_s: how long a thread that gave up the GIL waits for it, or for a processor.
      may_use_workers: whether the source could travel to worker processes.
      store_wait: the share of the time of reading in which threads waited for a store on the network.
      process: index of this process.
      default_threads: that would read if `Reading.threads` were None.
      found: names of the settings that are "auto": advice leaves them out.
      searching: whether better ones are being looked for.
    """

    reader: Reader
    threads: int
    workers: int
    buffer: int
    prefetch: int
    cores: int
    lock_wait_s: float = 0.0
    may_use_workers: bool = False
    store_wait: float = 0.0
    process: int = 0
    default_threads: int = 2
    found: frozenset[str] = frozenset()
    searching: bool = False

    @property
    def readers(self) -> int:
        """Threads or processes that make batches at a time."""
        return {"threads": max(1, self.threads), "workers": self.workers}.get(self.reader, 1)

    @property
    def parts(self) -> int:
        """In how many parts threads make a batch: each is a call of the source and of the transform."""
        return math.ceil(self.readers / self.buffer) if self.reader == "threads" else 1

    def with_threads(self, threads: int) -> Circumstances:
        """These circumstances with more threads and a buffer to match, so that no batch is cut into more calls."""
        return dataclasses.replace(self, threads=threads, buffer=max(self.buffer, math.ceil(threads / self.parts)))

    @property
    def settings(self) -> Settings:
        """The numbers that may be changed."""
        return Settings(self.threads, self.workers, self.buffer, self.prefetch)

    def with_settings(self, settings: Settings) -> Circumstances:
        """These circumstances with other settings. If there are workers, they read."""
        reader = self.reader
        if reader in ("threads", "workers"):
            reader = "workers" if settings.workers else "threads"
        return dataclasses.replace(self, reader=reader, **settings._asdict())

    @property
    def setting(self) -> Setting:
        """These circumstances in the form that the simulation takes."""
        if self.reader == "workers":
            ahead = self.workers * (max(1, self.buffer // self.workers) + 1) + 1
            return Setting(self.workers, False, 1, ahead, self.prefetch)
        if self.reader == "threads":
            return Setting(self.readers, True, self.parts, self.buffer + 1, self.prefetch)
        return Setting(1, True, 1, 1, 0 if self.reader == "caller" else self.prefetch)


@dataclasses.dataclass(frozen=True)
class ProcessTimes:
    """Mean times of a batch in one process, as it tells the others."""

    process: int
    read_s: float
    host_s: float
    place_s: float
    wait_s: float
    loop_s: float
    readers: int

    @property
    def wait_share(self) -> float:
        """The share of the time that its loop waits."""
        return self.wait_s / max(1e-12, self.wait_s + self.loop_s)

    @property
    def input_s(self) -> float:
        """The time between two batches that its input would allow."""
        return (self.read_s + self.host_s + self.place_s) / self.readers


def judge(
    window: Window, how: Circumstances, others: Sequence[ProcessTimes] = (), tuning: Sequence[str] = ()
) -> Report:
    """The report on a feed.

    Args:
      window: the batches to judge by.
      how: how the feed works.
      others: the times of all processes, if there are several; this one's may be among them.
      tuning: what was tried of settings that are "auto".
    """
    alone_s = _alone_s(window, how)
    bound, wait_share = _bound(window, alone_s), window.wait_share
    waits_in_next = wait_share >= LITTLE and window.wait_s >= window.late_s
    held_up = waits_in_next and _is_held_up(window, how, alone_s)
    if held_up:
        bound = "loop"
    change = _best_change(window, how, bound) if waits_in_next and not held_up else None
    wait_share = max([wait_share, *(each.wait_share for each in others)])
    slow = straggler(others)
    if slow is not None:
        bound, change = "straggler", change if slow.process == how.process else None
    compute_s = max(1e-9, window.loop_s - window.late_s)
    headroom = {name: compute_s / max(1e-9, seconds) for name, seconds in alone_s.items()}
    return Report(
        bound=bound,
        au=min(window.au, 1 - wait_share),
        wait_share=wait_share,
        headroom={**headroom, "compute": window.period_s / compute_s},
        advice=_advice(bound, change, window, how, headroom, slow, held_up),
        change=change,
        step_s=window.period_s,
        loop_s=window.loop_s,
        wait_s=window.wait_s,
        late_s=window.late_s,
        stages_s={name: window.mean(f"{name}_s") for name in ("read", "transform", "stage", "place")},
        cpu_s=window.mean("cpu_s"),
        batches=len(window.batches),
        drained=window.drained,
        process=how.process,
        straggler=slow,
        settings=how.settings._asdict(),
        tuning=tuning,
        idle_s=window.idle_s,
        held_up=held_up,
    )


def _alone_s(window: Window, how: Circumstances) -> dict[str, float]:
    """For each stage the time between two batches, if it were the only one."""
    alone_s = {name: window.mean(f"{name}_s") / how.readers for name in ("read", "host", "place")}
    if how.reader == "workers":  # one thread places what they read
        alone_s["place"] *= how.readers
    if window.late_s > LITTLE * window.loop_s:  # transfers are no faster than the loop
        alone_s["place"] = max(alone_s["place"], window.loop_s)
    return alone_s


def _bound(window: Window, alone_s: Mapping[str, float]) -> Bound:
    if window.wait_share < LITTLE:
        return "loop" if (window.idle_s or 0.0) > _MOSTLY * window.loop_s else "compute"
    if window.late_s > window.wait_s:
        return "place"
    slowest: Bound = max(("read", "host", "place"), key=alone_s.__getitem__)
    return slowest


def _is_held_up(window: Window, how: Circumstances, alone_s: Mapping[str, float]) -> bool:
    """Whether the loop waits although the stages are fast enough by their own times, one after the other."""
    if how.reader == "caller" or shares_lock(window, how) or sum(alone_s.values()) >= window.loop_s:
        return False
    # uneven batches may be the reason: of these the simulation knows
    return how.lock_wait_s > _MAX_GIL_WAIT_S or predicted_wait_s(window, how, how) < _MOSTLY * window.wait_s


def straggler(processes: Sequence[ProcessTimes]) -> Straggler | None:
    """The process whose loop waits for input that is slower than the input of the others; None: there is none."""
    if len(processes) < 2:
        return None
    slowest = max(processes, key=lambda each: each.input_s)
    others = [each for each in processes if each is not slowest]
    usual_s = statistics.median(each.input_s for each in others)
    if slowest.wait_share < LITTLE or slowest.input_s < _STRAGGLER_FACTOR * usual_s:
        return None

    def more_s(stage: str) -> float:
        usual_s: float = statistics.median(getattr(each, f"{stage}_s") for each in others)
        return float(getattr(slowest, f"{stage}_s")) - usual_s

    stage = max(("read", "host", "place"), key=more_s)
    stage_s = float(getattr(slowest, f"{stage}_s"))
    return Straggler(slowest.process, stage, stage_s, stage_s - more_s(stage), slowest.wait_share)


def _best_change(window: Window, how: Circumstances, bound: str) -> Change | None:
    """The change after which the loop waits least; of those that are as good, the smallest. None: none helps."""
    now_s = predicted_wait_s(window, how, how)
    little_s = 0.02 * window.loop_s  # as good as none
    tried: list[tuple[float, str, Circumstances]] = []
    for name, line in _changes(window, how).items():
        for then in line if name not in how.found else ():
            tried.append((predicted_wait_s(window, how, then), name, then))
            if tried[-1][0] <= little_s:
                break
    if now_s <= 0 or not tried:
        return None
    enough_s = max(1.02 * min(wait_s for wait_s, *_ in tried), little_s)
    enough = (each for each in tried if each[0] <= enough_s)
    wait_s, name, then = min(enough, key=lambda each: _growth(how, each[2]))
    if wait_s > _CLEARLY * now_s:
        return None
    share = _wait_share(window, wait_s / now_s)
    if share >= LITTLE and (fewer := _fewer_calls(window, how)) and fewer[1] < _CLEARLY * share:
        return None  # that is tried first, although it may be in vain
    before, after = getattr(how, name), getattr(then, name)
    if name not in ("threads", "workers"):
        return Change(name if name == "prefetch" else f"Reading.{name}", before, after, share)
    stage_s = window.mean(f"{bound}_s")
    buffer = None if then.buffer == how.buffer or "buffer" in how.found else (how.buffer, then.buffer)
    return Change(f"Reading.{name}", before, after, share, bound, stage_s / how.readers, stage_s / after, buffer)


def _wait_share(window: Window, factor: float) -> float:
    """The wait share if the time in `next` were multiplied by `factor`."""
    wait_s = window.wait_s * factor
    return (wait_s + window.late_s) / (wait_s + window.loop_s)


def _fewer_calls(window: Window, how: Circumstances) -> tuple[int, float] | None:
    """The buffer with which a batch is cut into fewer calls, and the share that the loop then waits at the least.

    None: there is none, or it would not help, or calls compute, which takes less time for fewer rows.
    """
    then = dataclasses.replace(how, buffer=min(how.readers, _MAX_BATCHES))
    computes_s = window.mean("read_cpu_s") + window.mean("host_cpu_s")
    computes = computes_s >= _MOSTLY * (window.mean("read_s") + window.mean("host_s"))
    if then.parts >= how.parts or computes or "buffer" in how.found:
        return None
    factor = predicted_wait_s(window, how, then, hopeful=True) / max(1e-9, predicted_wait_s(window, how, how))
    return (then.buffer, _wait_share(window, factor)) if factor < _CLEARLY else None


def _growth(now: Circumstances, then: Circumstances) -> tuple[int, int]:
    """How many settings grow; and by how many threads, workers and batches together."""
    grown = [b - a for a, b in zip(now.settings, then.settings, strict=True) if b > a]
    return len(grown), sum(grown)


def _changes(window: Window, how: Circumstances) -> dict[str, list[Circumstances]]:
    """By the name of a setting: what may help, the smallest change first."""
    if how.reader == "caller":
        return {"prefetch": [dataclasses.replace(how, reader="threads", threads=how.default_threads, prefetch=2)]}
    lines: dict[str, list[Circumstances]] = {}
    take_turns = shares_lock(window, how)
    if how.store_wait <= _MOSTLY:  # else what comes next is fetched already, however many threads wait for it
        if how.reader == "threads" and not take_turns:
            lines["threads"] = [how.with_threads(n) for n in range(how.readers + 1, _MAX_THREADS + 1)]
        if how.reader == "workers" or (how.may_use_workers and take_turns):
            numbers = range(how.workers + 1, max(how.cores, how.workers + 1) + 1)
            lines["workers"] = [how.with_settings(how.settings._replace(threads=0, workers=n)) for n in numbers]
    for name in ("prefetch",) if how.reader == "stream" else ("buffer", "prefetch"):
        size = getattr(how, name)
        larger = (factor * size for factor in (2, 4, 8, 16, 32) if factor * size <= _MAX_BATCHES)
        lines[name] = [dataclasses.replace(how, **{name: each}) for each in larger]
    return lines


def predicted_wait_s(window: Window, now: Circumstances, then: Circumstances, *, hopeful: bool = False) -> float:
    """Upper bound of the time that the loop would wait for a batch; `hopeful`: lower bound.

    A call may take as long for fewer rows, as a lookup does, and calls of one size do not tell. Then this counts
    the full time for each further call into which a batch would be cut, and nothing for those that would be saved.
    """
    more = then.parts / now.parts - 1  # calls for each one now
    call_s = window.fixed_s_of_calls[(more > 0) != hopeful]

    def make_s(batch: BatchTimes) -> float:
        made_s = batch.read_s + batch.host_s
        return made_s + more * min(call_s * max(1, len(batch.parts)), made_s)

    costs = [Costs(make_s(batch), batch.place_s, batch.loop_s or 0.0) for batch in window.batches]
    if shares_lock(window, now) and then.reader == "workers":  # then neither they nor the loop wait for the GIL
        costs = [
            Costs(batch.read_cpu_s + batch.host_cpu_s, batch.place_s, max(0.0, cost.loop_s - now.lock_wait_s))
            for batch, cost in zip(window.batches, costs, strict=True)
        ]
    processors = 1 if shares_lock(window, then) else then.cores
    return simulated_wait_s(costs, then.setting, window.mean("cpu_s") / processors)


def shares_lock(window: Window, how: Circumstances) -> bool:
    """Whether Python code of the feed holds the GIL and makes its threads take turns.

    A thread that computes holds it no longer than that. Threads that sleep wait for others, or for a processor.
    """
    computes = window.mean("cpu_s") > max(_MIN_CPU_S, how.lock_wait_s)
    return how.reader == "threads" and how.lock_wait_s > _MAX_GIL_WAIT_S and computes


def _advice(
    bound: str,
    change: Change | None,
    window: Window,
    how: Circumstances,
    headroom: dict[str, float],
    slow: Straggler | None,
    held_up: bool,
) -> str:
    if slow is not None and slow.process != how.process:
        return f"look at process {slow.process}: its own report says what to change there"
    if held_up and slow is None:
        return (
            f"no setting helps: a batch needs {milliseconds(window.mean('cpu_s'))} ms of processor time, but a "
            f"thread that gives up the GIL gets it back after {milliseconds(how.lock_wait_s)} ms; look for Python "
            f"threads of your own that compute, and for other programs on these {how.cores} cores"
        )
    if bound == "loop":
        return (
            "nothing to change in the feed: log, save and fetch values less often, or on another thread, so that "
            "the next step is dispatched before this one ends"
        )
    if bound == "compute":
        stage = min(headroom, key=lambda name: headroom[name])
        return (
            f"nothing to change: input could be {factor(headroom[stage])} times as fast as the loop "
            f"({STAGES[stage]} would bind next); a faster step trains faster{_and_python(window)}"
        )
    if change is not None:
        waits = f"wait {percent(window.wait_share)} → {percent(change.wait_share)}"
        name = change.setting.removeprefix("Reading.")
        room = "" if change.buffer is None else ", buffer {} → {}".format(*change.buffer)
        faster = ""
        if change.stage is not None:
            stage_ms = (milliseconds(seconds) for seconds in (change.stage_now_s, change.stage_then_s))
            faster = f"{STAGES[change.stage]} {' → '.join(stage_ms)} ms, "
        return f"{name} {change.now} → {change.then}{room}: {faster}{waits}"
    if how.searching:
        return f"nothing yet: better values of {', '.join(sorted(how.found))} are being looked for"
    return _without_a_setting(bound if slow is None else slow.stage, window, how)


def _and_python(window: Window) -> str:
    """What else would make a loop faster whose devices compute for most of the time."""
    idle_share = (window.idle_s or 0.0) / max(1e-9, window.period_s)
    if idle_share < LITTLE:
        return ""
    return (
        f", and so does less Python between steps, in which the devices are idle {percent(idle_share)} of the time"
    )


def _without_a_setting(bound: str, window: Window, how: Circumstances) -> str:
    """What to do where no setting that the user chose would help."""
    if window.late_s > window.wait_s and how.prefetch < 2 and "prefetch" not in how.found:
        return (
            f"prefetch {how.prefetch} → 2: a transfer overlaps with the step only if its batch is placed two ahead"
        )
    if (fewer := _fewer_calls(window, how)) is not None:
        return (
            f"buffer {how.buffer} → {fewer[0]}: wait {percent(window.wait_share)} → {percent(fewer[1])}, if a "
            f"call takes as long for fewer rows, as a lookup or a request does; {how.parts} calls make a batch now"
        )
    if bound == "place":
        return (
            "no setting helps: ship fewer bytes (uint8 or bfloat16, converted in the step), and fewer, larger "
            "leaves"
        )
    spent_s, cpu_s = window.mean(f"{bound}_s"), window.mean(f"{bound}_cpu_s")
    if how.reader == "stream":
        return (
            "no setting helps: one thread reads a stream; give a Grain dataset workers, or more of them, by "
            "mp_prefetch, or use a source with random access, which several threads can read"
        )
    if bound == "read" and how.store_wait > _MOSTLY:
        return (
            f"no setting helps: the store is the limit, for which threads wait {percent(how.store_wait)} of the "
            "time of reading; let the cache on local disk hold the data (feedline.Store(cache_bytes=...)), or "
            "read neighbouring rows together with Order(shuffle=Blocks(...))"
        )
    if bound == "read" and cpu_s < 0.5 * spent_s:
        fewer_too = "; if fewer threads are as fast, go back to them" if how.reader == "threads" else ""
        return (
            f"no setting helps: storage is slower than training{fewer_too}; read neighbouring rows together with "
            "Order(shuffle=Blocks(...)), or copy the data to a faster disk or into memory"
        )
    if shares_lock(window, how):
        return (
            f"no setting helps: {STAGES[bound]} holds the GIL, so threads take turns; use NumPy "
            "calls on whole batches, or write rows to a file, so that Reading(workers=...) can be used"
        )
    return (
        f"no setting helps: {STAGES[bound]} needs {milliseconds(cpu_s)} ms of processor time a batch on "
        f"{how.cores} cores; make it cheaper, do it once and save the result, or do it in the step"
    )
