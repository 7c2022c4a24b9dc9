"""Finds the settings of a feed while it trains: which to try next, and what to keep. Pure.

A search starts from the settings in use. A simulation with the measured times orders the settings that may be
faster; these are tried one after the other, and each is judged by what was measured with it. The first one that is
faster by more than the noise becomes the new start. The search ends when the loop hardly waits, or when nothing
that is left promises to be faster.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import NamedTuple

from feedline._src.bounds import Bounds
from feedline._src.listen.candidates import Candidate, candidates, exceeds_cores, held_up_s
from feedline._src.listen.verdict import Circumstances
from feedline._src.listen.window import Window
from feedline._src.listen.words import milliseconds, percent
from feedline._src.options import Settings

LITTLE = 0.02
"""A share of waiting, or of gain, that is not worth a change."""
MAX_CHANGES = 12
"""Changes in one search, without the last one, which goes back to the best settings."""
_MIN_BATCHES, _MIN_S = 32, 0.5
"""A setting is judged by at least as many batches and seconds."""
_ENOUGH_BATCHES, _ENOUGH_S = 128, 15.0
"""With either a setting is judged, however noisy its times are."""
_CLEAR_GAIN = 0.2
"""A share of the step that is a gain even where batches are so uneven that means tell little."""
_BLOCK = 8
"""Batches of which a mean is taken, to see how much means vary."""
_CLEARLY = 0.2
"""The share of a step by which the loop waits longer than before when a new search begins."""
_PAUSE_S = 60.0
"""Between two searches; doubled after each."""
_MAX_HISTORY = 32


class Measured(NamedTuple):
    """What settings were measured to give: the time of a step, its uncertainty, and the share of waiting."""

    step_s: float
    error_s: float
    wait_share: float

    @classmethod
    def of(cls, window: Window, how: Circumstances) -> Measured:
        """Of the batches of a window. Waiting for the GIL counts, too."""
        steps = [batch.wait_s + (batch.loop_s or 0.0) for batch in window.batches]
        means = [sum(steps[i : i + _BLOCK]) / _BLOCK for i in range(0, len(steps) - _BLOCK + 1, _BLOCK)]
        error_s = 0.0
        if len(means) > 1:
            mean = sum(means) / len(means)
            error_s = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
        waits_s = window.wait_s + held_up_s(window, how)
        return cls(window.period_s, error_s, waits_s / max(1e-12, window.period_s))

    @property
    def wait_s(self) -> float:
        """What the loop waits in a step."""
        return self.step_s * self.wait_share

    def is_faster_than(self, other: Measured) -> bool:
        """By more than the noise of both; by a fifth, however noisy they are."""
        noise_s = min(2 * math.hypot(self.error_s, other.error_s), _CLEAR_GAIN * other.step_s)
        return self.step_s < other.step_s - max(noise_s, LITTLE * other.step_s)

    def __str__(self) -> str:
        return f"{milliseconds(self.step_s)} ms a step, wait {percent(self.wait_share)}"


class Tuning:
    """Proposes settings. For one thread at a time; it has no clock: time is that of the batches.

    Attributes:
      history: what was tried, and what came of it, one sentence each.

    Args:
      bounds: what may be changed, and how far.
      start: the settings in use.
      log: called with each sentence.
    """

    def __init__(
        self, bounds: Bounds, start: Settings, log: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.history: collections.deque[str] = collections.deque(maxlen=_MAX_HISTORY)
        self._log = log
        self._bounds = bounds
        self._asked = start  # the settings that were proposed last
        self._best = start
        self._measured: Measured | None = None  # with the best settings; None until they were measured
        self._left: list[Candidate] = []  # to be tried, the most promising first
        self._tried: set[Settings] = set()  # those measured in this search: none is tried twice
        self._changes = 0
        self._settled = False
        self._again_s, self._pause_s = -math.inf, _PAUSE_S  # no new search before then

    @property
    def settled(self) -> bool:
        """Whether the search has ended."""
        return self._settled

    def propose(self, window: Window, how: Circumstances) -> Settings | None:
        """The settings to go on with; None: those in use.

        Args:
          window: batches that were made with the settings in use.
          how: how the feed works now.
        """
        if how.settings != self._asked:  # the last proposal has not been taken up
            return self._asked
        if exceeds_cores(window, how, self._bounds):
            return self._fewer_threads(how)
        if not _is_enough(window, how):
            return None
        found = Measured.of(window, how)
        if self._settled:
            if not self._waits_longer(window, how):
                return None
            self._begin_again(found)
        self._tried.add(how.settings)
        if how.settings == self._best:
            self._measured = found
            self._left = candidates(window, how, self._bounds)
        elif self._measured is not None and not found.is_faster_than(self._measured):
            self._note(
                f"{_difference(self._best, how.settings)} is no clear gain: {found}, before {self._measured}"
            )
        else:
            self._note(f"keeps {_difference(self._best, how.settings)}: {found}, before {self._measured}")
            self._best, self._measured = how.settings, found
            self._left = candidates(window, how, self._bounds)
        return self._next(window)

    def give_up_workers(self, reason: str, now: Settings) -> None:
        """Workers failed, and are not tried again. The feed goes on with the settings `now`, and a new search."""
        self._bounds = self._bounds.without_workers()
        self._tried.clear()
        self._changes = 0
        self._left = [each for each in self._left if not each.settings.workers]
        self._note(f"goes back to threads, because workers failed with {reason}")
        if self._best.workers:
            self._best, self._measured = now, None
        self._asked, self._settled = now, False

    def _next(self, window: Window) -> Settings | None:
        """The next settings to try, or the best ones for good."""
        assert self._measured is not None
        waits = self._measured.wait_share > LITTLE
        while waits and self._left and self._changes < MAX_CHANGES:
            candidate = self._left.pop(0)
            if candidate.settings not in self._tried:
                self._changes += 1
                self._note(f"tries {_difference(self._best, candidate.settings)}, because {candidate.reason}")
                return self._ask(candidate.settings)
        self._settled = True
        self._again_s = window.batches[-1].taken + self._pause_s
        why = "nothing else promises to be faster" if waits else "the loop hardly waits"
        if self._changes >= MAX_CHANGES:
            why = f"{self._changes} settings were tried, and more are not"
        self._note(f"stays with {self._found()}: {self._measured}; {why}")
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
        if window.batches[-1].taken < self._again_s or len(window.batches) < 2 * _MIN_BATCHES:
            return False
        middle = len(window.batches) // 2
        for batches in (window.batches[:middle], window.batches[middle:]):
            half = Measured.of(Window(batches, 0, window.drained), how)
            if half.wait_s - self._measured.wait_s <= _CLEARLY * half.step_s:
                return False
        return True

    def _begin_again(self, found: Measured) -> None:
        self._note(f"searches again: {found}, before {self._measured}")
        self._tried.clear()
        self._settled, self._changes = False, 0
        self._pause_s *= 2

    def _fewer_threads(self, how: Circumstances) -> Settings:
        """Fall back to one thread for each core, which no work can exceed."""
        settings = how.settings._replace(threads=self._bounds.cores)
        self._note(f"{_difference(how.settings, settings)}: they kept more than {self._bounds.cores} cores busy")
        self._tried.add(how.settings)
        self._best, self._asked, self._measured = settings, settings, None
        self._left, self._settled = [], False
        return settings

    def _found(self) -> str:
        """The best values of the settings that may be changed. Where workers read, threads do not."""
        unused = {"threads"} if self._best.workers else set()
        found = self._best._asdict().items()
        return ", ".join(f"{name} {value}" for name, value in found if name in self._bounds.tunable - unused)

    def _note(self, sentence: str) -> None:
        self.history.append(sentence)
        self._log(sentence)


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
