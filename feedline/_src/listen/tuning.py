"""Finds the settings of a feed that are "auto", while it trains.

A search starts from the settings in use, and tries others one after the other: more threads, more room for batches
that wait, workers where threads take turns. Each is judged by what was measured with it. The first one that is
faster by more than the noise becomes the new start. The search ends when the loop hardly waits, or when nothing is
left to try.
"""

from __future__ import annotations

import collections
import logging
import math
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from feedline._src.bounds import Bounds
from feedline._src.listen.accounts import Accounts, Window
from feedline._src.listen.verdict import Circumstances, predicted_wait_s, shares_gil
from feedline._src.listen.words import milliseconds, percent
from feedline._src.options import Settings

_log = logging.getLogger("feedline")
LITTLE = 0.02
"""A share of waiting, or of gain, that is not worth a change."""
MAX_CHANGES = 12
"""Changes in one search, without the last one, which goes back to the best settings."""
_MIN_BATCHES, _MIN_S = 32, 0.5
"""A setting is judged by at least as many batches and seconds."""
_ENOUGH_BATCHES, _ENOUGH_S = 128, 15.0
"""With either a setting is judged, however noisy its times are."""
_CLEAR_GAIN = 0.2
"""A share of the step: a gain, however uneven batches are; and a longer wait, after which a new search begins."""
_BLOCK = 8
"""Batches of which a mean is taken, to see how much means vary."""
_PAUSE_S = 60.0
"""Between two searches; doubled after each."""
_MAX_THREADS, _MAX_ROOM = 64, 32
_MAX_HISTORY = 32
_LOOK_EVERY_S = 0.25
_MAX_ERROR_LENGTH = 200


class Measured(NamedTuple):
    """What settings were measured to give: the time of a step, its uncertainty, and the share of waiting."""

    step_s: float
    error_s: float
    wait_share: float

    @classmethod
    def of(cls, window: Window, how: Circumstances) -> Measured:
        """Of the batches of a window. Waiting for the GIL counts, too."""
        steps = [batch.wait_s + batch.loop_s for batch in window.batches]
        means = [sum(steps[i : i + _BLOCK]) / _BLOCK for i in range(0, len(steps) - _BLOCK + 1, _BLOCK)]
        error_s = 0.0
        if len(means) > 1:
            mean = sum(means) / len(means)
            error_s = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
        gil_s = min(how.gil_wait_s, window.loop_s) if shares_gil(window, how) else 0.0
        return cls(window.period_s, error_s, (window.wait_s + gil_s) / max(1e-12, window.period_s))

    def is_faster_than(self, other: Measured) -> bool:
        """By more than the noise of both; by a fifth, however noisy they are."""
        noise_s = min(2 * math.hypot(self.error_s, other.error_s), _CLEAR_GAIN * other.step_s)
        return self.step_s < other.step_s - max(noise_s, LITTLE * other.step_s)

    def __str__(self) -> str:
        return f"{milliseconds(self.step_s)} ms a step, wait {percent(self.wait_share)}"


class Tuner:
    """Searches for settings. Time is that of the batches.

    Threads that place batches call `look`, one at a time. The training thread reads `proposal`, gives up its
    pipeline, and calls `changed`; until then there is no other proposal. So an interrupt in between makes it do
    the same again.
    """

    def __init__(self, bounds: Bounds, start: Settings) -> None:
        self.proposal: Settings | None = None
        self.start = start  # what the feed began with, without workers that the search chose
        self.changed_at = -math.inf  # when settings changed the last time
        self.history: collections.deque[str] = collections.deque(maxlen=_MAX_HISTORY)  # what came of each trial
        self._bounds = bounds
        self._asked = self._best = start  # the settings that were proposed last, and the best ones
        self._measured: Measured | None = None  # with the best settings; None until they were measured
        self._left: list[Settings] = []  # to be tried
        self._tried: set[Settings] = set()  # those measured in this search: none is tried twice
        self._changes = 0
        self._settled = False  # the search has ended
        self._again_s, self._pause_s = -math.inf, _PAUSE_S  # no new search before then
        self._looked_at = -math.inf
        self._failed: str | None = None  # why workers failed, until the search knows it

    @property
    def settled(self) -> bool:
        """Whether the search has ended, and its result is in use."""
        return self._settled and self.proposal is None

    def look(self, accounts: Accounts, circumstances: Callable[[], Circumstances]) -> None:
        """Propose a change if the batches since the last one suffice to judge by, and ask for one."""
        now = time.perf_counter()
        if self.proposal is not None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        how, failed = circumstances(), self._failed
        if failed is not None:
            self._give_up_workers(failed, how.settings)
            self._failed = None
        window = accounts.window(self.changed_at)
        proposal = None if window is None else self.propose(window, how)
        if self._failed is None:  # the training thread may have given up workers meanwhile
            self.proposal = proposal

    def changed(self) -> None:
        """The proposal was taken up: what follows is made with it."""
        self.changed_at = time.perf_counter()
        self.proposal = None

    def does_without_workers(self, error: Exception) -> bool:
        """Whether `start` works after workers failed, since the search chose them."""
        chosen = "workers" in self._bounds.tunable
        if chosen:
            self._failed = textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_ERROR_LENGTH)  # in one line
        return chosen

    def propose(self, window: Window, how: Circumstances) -> Settings | None:
        """The settings to go on with; None: those in use. `window`: batches that were made with these."""
        if how.settings != self._asked:  # the last proposal has not been taken up
            return self._asked
        if not _is_enough(window, how):
            return None
        cores, tunes = self._bounds.cores, "threads" in self._bounds.tunable
        if tunes and how.settings.threads > cores and window.mean("cpu_s") > 1.1 * cores * window.period_s:
            self._restart(how.settings._replace(threads=cores), f"they kept more than {cores} cores busy")
            return self._asked
        found = Measured.of(window, how)
        if self._settled:
            if not self._waits_longer(window, how):
                return None
            self._note(f"searches again: {found}, before {self._measured}")
            self._tried.clear()
            self._changes, self._pause_s, self._settled = 0, 2 * self._pause_s, False
        self._tried.add(how.settings)
        difference = _difference(self._best, how.settings)
        if difference and self._measured is not None and not found.is_faster_than(self._measured):
            self._note(f"{difference} is no clear gain: {found}, before {self._measured}")
        else:
            if difference:
                self._note(f"keeps {difference}: {found}, before {self._measured}")
            self._best, self._measured = how.settings, found
            self._left = [each for each in candidates(window, how, self._bounds) if self._bounds.allow(each)]
        return self._next(window)

    def _give_up_workers(self, reason: str, now: Settings) -> None:
        """Workers failed, and are not tried again. The feed goes on with the settings `now`, and a new search."""
        self._bounds = self._bounds.without_workers()
        self._tried.clear()
        self._changes = 0
        self._restart(now, f"workers failed with {reason}")

    def _restart(self, settings: Settings, reason: str) -> None:
        """Search from other settings on, whatever was measured."""
        self._note(f"goes back to threads {settings.threads}: {reason}")
        self._asked = self._best = settings
        self._measured, self._left, self._settled = None, [], False

    def _next(self, window: Window) -> Settings | None:
        """The next settings to try, or the best ones for good."""
        assert self._measured is not None
        waits = self._measured.wait_share > LITTLE
        while waits and self._left and self._changes < MAX_CHANGES:
            settings = self._left.pop(0)
            if settings not in self._tried:
                self._changes += 1
                self._note(f"tries {_difference(self._best, settings)}: {self._measured}")
                return self._ask(settings)
        self._settled, self._again_s = True, window.batches[-1].taken + self._pause_s
        why = f"tried {self._changes} settings" if waits else "the loop hardly waits"
        unused = {"threads"} if self._best.workers else set()  # where workers read
        found = [
            f"{name} {value}"
            for name, value in self._best._asdict().items()
            if name in self._bounds.tunable - unused
        ]
        self._note(f"stays with {', '.join(found)}: {self._measured}; {why}")
        return self._ask(self._best)

    def _ask(self, settings: Settings) -> Settings | None:
        before, self._asked = self._asked, settings
        return None if settings == before else settings

    def _waits_longer(self, window: Window, how: Circumstances) -> bool:
        """Whether the loop waits clearly longer for a batch than when the search ended, in both halves.

        The time of a step does not tell: it grows if training itself slows down, and a loop that became faster
        than its input has shorter steps.
        """
        assert self._measured is not None
        middle = len(window.batches) // 2
        if window.batches[-1].taken < self._again_s or middle < _MIN_BATCHES:
            return False
        before_s = self._measured.step_s * self._measured.wait_share
        halves = [window.batches[:middle], window.batches[middle:]]
        found = [Measured.of(Window(half, window.drained), how) for half in halves]
        return all(each.step_s * each.wait_share - before_s > _CLEAR_GAIN * each.step_s for each in found)

    def _note(self, sentence: str) -> None:
        self.history.append(sentence)
        _log.info("tuning %s", sentence)


def candidates(window: Window, how: Circumstances, bounds: Bounds) -> Iterator[Settings]:
    """Settings that may be faster than those in use, the most promising first."""
    now, tunable = how.settings, bounds.tunable
    if how.stream:  # only where the simulation promises a gain: its own workers start again at each change
        now_s = predicted_wait_s(window, how, how)
        for prefetch in (each for each in (4, 8, 16, _MAX_ROOM) if each > now.prefetch):
            if predicted_wait_s(window, how, how.having(prefetch=prefetch)) < now_s / 2:
                yield now._replace(prefetch=prefetch)
        return

    def room(least: int, *names: str) -> dict[str, int]:
        """The named sizes that may be changed, at least so large."""
        return {name: max(getattr(now, name), min(least, _MAX_ROOM)) for name in names if name in tunable}

    busy = window.mean("cpu_s") / max(1e-12, window.period_s)  # processors
    take_turns = shares_gil(window, how) or (now.threads > 1 and how.cores > 1 and 0.7 < busy < 1.3)
    numbers = [bounds.cores >> shift for shift in range(bounds.cores.bit_length())]
    workers = [now._replace(threads=0, workers=number) for number in numbers if number != now.workers]
    if "workers" not in tunable or not how.may_use_workers or not (now.workers or take_turns):
        workers = []
    if shares_gil(window, how):
        yield from workers
    if "threads" in tunable and how.reader == "threads":
        threads = min(2 * now.threads, _most_threads(window, bounds), _MAX_THREADS)
        if threads > now.threads and busy < 0.9 * bounds.cores:
            buffer = math.ceil(threads / how.parts)  # so that no batch is cut into more calls
            yield now._replace(threads=threads, **room(buffer, "buffer"))
            yield now._replace(threads=threads, **room(buffer, "buffer"), **room(threads, "prefetch"))
            yield now._replace(threads=threads)
    for factor in (2, 4):
        largest = factor * max(now.buffer, now.prefetch)
        yield now._replace(**room(largest, "buffer", "prefetch"))
    if "threads" in tunable and how.reader == "threads" and now.threads > 1 and busy > 0.5:
        yield now._replace(threads=now.threads * 3 // 4 if now.threads > 2 else 1)  # they may hinder each other
    yield from workers


def _most_threads(window: Window, bounds: Bounds) -> int:
    """Threads that keep at most `cores` busy, if each goes on to need the processor as much as it does now."""
    spent_s = window.mean("read_s") + window.mean("host_s") + window.mean("place_s")
    busy = min(1.0, window.mean("cpu_s") / spent_s) if spent_s > 0 else 1.0
    return max(1, int(bounds.cores / max(busy, 1e-3)))


def _is_enough(window: Window, how: Circumstances) -> bool:
    """Whether a window is long enough to judge by."""
    count, span_s = len(window.batches), window.batches[-1].taken - window.batches[0].taken
    if not window.drained or count < _MIN_BATCHES or (span_s < _MIN_S and count < _ENOUGH_BATCHES):
        return False
    if count >= _ENOUGH_BATCHES or span_s >= _ENOUGH_S:
        return True
    found = Measured.of(window, how)
    return 2 * found.error_s <= LITTLE * found.step_s


def _difference(before: Settings, after: Settings) -> str:
    changed = [name for name in Settings._fields if getattr(before, name) != getattr(after, name)]
    if "workers" in changed and "threads" in changed:  # where workers read, threads do not
        changed.remove("threads")
    return ", ".join(f"{name} {getattr(before, name)} → {getattr(after, name)}" for name in changed)
