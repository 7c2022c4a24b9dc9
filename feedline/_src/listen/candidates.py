"""Which settings of a feed may be faster than those in use, the most promising first; and their bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from feedline._src.bounds import Bounds
from feedline._src.listen.verdict import Circumstances, predicted_wait_s, shares_lock
from feedline._src.listen.window import Window
from feedline._src.listen.words import milliseconds, percent
from feedline._src.options import Settings

_THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROOM = (1, 2, 4, 8, 16, 32)
_WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SAMPLE = 64
"""Batches that are simulated: each of some thirty simulations holds the GIL for milliseconds."""
_MIN_GAIN = 0.02
"""Share of the step below which a predicted gain does not count."""
_MIN_WAIT_SHARE = 0.05
"""Above this wait share, also try settings that the simulation does not favour."""
_BEFORE_PROBES = 2
"""Settings favoured by the simulation that are tried before those."""


class Candidate(NamedTuple):
    """Settings to try, and why."""

    settings: Settings
    reason: str


def candidates(window: Window, how: Circumstances, bounds: Bounds) -> list[Candidate]:
    """The settings to try, the most promising first; those that need less memory first if they promise as much.

    Args:
      window: batches that were made with the settings in use.
      how: how the feed works now.
      bounds: of the settings.
    """
    sample = Window(window.batches[-_SAMPLE:], min(window.last, _SAMPLE), window.drained)
    step_s, wait_s, held_s = window.period_s, window.wait_s, held_up_s(window, how)
    simulated_s = predicted_wait_s(sample, how, how)

    def predicted_s(settings: Settings) -> float:
        then_s = predicted_wait_s(sample, how, how.with_settings(settings))
        if simulated_s > 0:
            then_s *= wait_s / simulated_s
        elif not settings.workers:  # nothing that the simulation knows of makes the loop wait
            return step_s
        return window.loop_s + then_s - (held_s if settings.workers else 0.0)

    promising: dict[Settings, float] = {}
    for line in itertools.chain(_lines(window, how, bounds), _pairs(window, how, bounds)):
        if min(promising.values(), default=step_s) < (1 + _MIN_GAIN) * (step_s - wait_s - held_s):
            break  # as good as no waiting
        tried = [(predicted_s(settings), settings) for settings in line]
        if tried:
            enough_s = min(predicted for predicted, _ in tried) + _MIN_GAIN * step_s / 2
            predicted, settings = next(each for each in tried if each[0] <= enough_s)
            if predicted < (1 - _MIN_GAIN) * step_s:
                promising[settings] = predicted
    best_s = min(promising.values(), default=0.0)

    def rank(settings: Settings) -> tuple[int, int]:
        """How many noticeable gains it is from the best; then its memory."""
        return int((promising[settings] - best_s) / (_MIN_GAIN * step_s)), bounds.host_use(settings)

    ordered = sorted(promising, key=rank)
    waits = f"the loop waits {percent((wait_s + held_s) / max(1e-12, step_s))} of the time"
    found = [
        Candidate(each, f"{waits} and a simulation promises {milliseconds(promising[each])} ms a step")
        for each in ordered
    ]
    if wait_s + held_s > _MIN_WAIT_SHARE * step_s:
        fewer = f"{waits} and threads may hinder each other"
        probes = [
            Candidate(each, fewer if 0 < each.threads < how.threads else waits)
            for each in _probes(window, how, bounds)
            if each not in promising
        ]
        # if the first predictions are wrong, the others are as a rule wrong for the same reason
        found = found[:_BEFORE_PROBES] + probes + found[_BEFORE_PROBES:]
    return found


def held_up_s(window: Window, how: Circumstances) -> float:
    """The part of the loop's own time in which it waits for the GIL, at the least."""
    return min(how.lock_wait_s, window.loop_s) if shares_lock(window, how) else 0.0


def _lines(window: Window, how: Circumstances, bounds: Bounds) -> Iterator[list[Settings]]:
    """Settings of which one number differs from those in use, ascending; one list for each number."""
    now = how.settings
    yield bounds.allowed(now._replace(threads=n) for n in _more_threads(window, how, bounds))
    for name in ("buffer", "prefetch"):
        if name in bounds.tunable:
            yield bounds.allowed(now._replace(**{name: n}) for n in _ROOM if n > getattr(now, name))
    if "workers" in bounds.tunable and (how.reader == "workers" or _may_need_workers(window, how)):
        numbers = sorted({*_WORKERS, bounds.cores})
        yield bounds.allowed(now._replace(threads=0, workers=n) for n in numbers if n > now.workers)


def _pairs(window: Window, how: Circumstances, bounds: Bounds) -> Iterator[list[Settings]]:
    """Settings of which two numbers differ: concurrent threads need as many slots, and bursts need room twice."""
    now, threads = how.settings, _more_threads(window, how, bounds)
    for name in ("prefetch", "buffer"):
        if name in bounds.tunable:
            sizes = [max(getattr(now, name), min(n, _ROOM[-1])) for n in threads]
            pairs = zip(threads, sizes, strict=True)
            yield bounds.allowed(now._replace(**{"threads": n, name: size}) for n, size in pairs)
    if {"buffer", "prefetch"} <= bounds.tunable:
        more = [n for n in _ROOM if n > now.buffer]
        yield bounds.allowed(now._replace(buffer=n, prefetch=max(n, now.prefetch)) for n in more)


def _more_threads(window: Window, how: Circumstances, bounds: Bounds) -> list[int]:
    if "threads" not in bounds.tunable or how.reader != "threads":
        return []
    most = most_threads(window, bounds)
    return [n for n in _THREADS if how.threads < n <= most]


def most_threads(window: Window, bounds: Bounds) -> int:
    """Threads that keep at most `cores` busy, if each goes on to need the processor as much as it does now."""
    spent_s = window.mean("read_s") + window.mean("host_s") + window.mean("place_s")
    busy = min(1.0, window.mean("cpu_s") / spent_s) if spent_s > 0 else 1.0
    return max(1, int(bounds.cores / max(busy, 1e-3)))


def exceeds_cores(window: Window, how: Circumstances, bounds: Bounds) -> bool:
    """Whether more threads than `cores` keep more than that many busy."""
    if "threads" not in bounds.tunable or how.reader != "threads" or how.threads <= bounds.cores:
        return False
    return len(window.batches) >= _SAMPLE // 2 and window.mean("cpu_s") > 1.1 * bounds.cores * window.period_s


def _probes(window: Window, how: Circumstances, bounds: Bounds) -> Iterator[Settings]:
    """Neighbours of which a simulation expects too little: reads that wait together, threads that contend."""
    if how.reader == "stream":  # one thread reads it; and its own workers would start again at each change
        return
    now, more = how.settings, _more_threads(window, how, bounds)
    names = [name for name in ("buffer", "prefetch") if name in bounds.tunable]

    def with_room(factor: int) -> Settings:
        sizes = {name: getattr(now, name) for name in names}
        return now._replace(**{name: max(size, min(factor * size, _ROOM[-1])) for name, size in sizes.items()})

    found = []
    if more:
        found += [now._replace(threads=more[0]), with_room(2)._replace(threads=min(2 * now.threads, more[-1]))]
    computes = window.mean("cpu_s") > 0.5 * window.period_s
    if computes and "threads" in bounds.tunable and now.threads > 1 and how.reader == "threads":
        found.insert(0, now._replace(threads=max(n for n in _THREADS if n < now.threads)))
    found.append(with_room(4))
    if "workers" in bounds.tunable and _may_need_workers(window, how):
        found.append(now._replace(threads=0, workers=bounds.cores))
    yield from bounds.allowed(found)


def _may_need_workers(window: Window, how: Circumstances) -> bool:
    """Whether threads seem to take turns: they hold the GIL, or together use one core."""
    waits_s = window.wait_s + held_up_s(window, how)
    if how.reader != "threads" or not how.may_use_workers or waits_s < _MIN_WAIT_SHARE * window.period_s:
        return False
    busy = window.mean("cpu_s") / max(1e-12, window.period_s)
    return shares_lock(window, how) or (how.threads > 1 and how.cores > 1 and 0.7 < busy < 1.3)
