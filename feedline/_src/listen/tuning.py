"""Finds the settings of a feed that are "auto", while it trains.

A search tries what the report advises: the settings with which the loop is predicted to wait least. A trial that
makes a step at least 3 % shorter becomes the new start. The search ends when the loop hardly waits, or when no
change promises a gain.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import textwrap
from collections.abc import Generator
from typing import NamedTuple

from feedline._src.bounds import Bounds
from feedline._src.listen.report import Change
from feedline._src.listen.verdict import Circumstances, best_settings
from feedline._src.listen.words import milliseconds, percent
from feedline._src.options import Settings

_log = logging.getLogger("feedline")
LITTLE = 0.02  # below this wait share nothing is changed
MAX_CHANGES = 12  # trials of one search; then it goes back to the best settings
_MIN_GAIN = 0.03  # a trial is kept if a step became shorter by this share
_LONGER_WAIT = 0.2  # a new search begins if the wait grew by this share of a step
_MIN_BATCHES, _MIN_S, _ENOUGH_BATCHES = 32, 5.0, 128  # judged by 32 batches and five seconds, or by 128 batches
_PAUSE_S = 60.0  # minimum time between two searches; doubled after each
_MAX_THREADS = 64
_MAX_HISTORY = 32
_MAX_ERROR_LENGTH = 200


class Measured(NamedTuple):
    """What settings were measured to give: the time of a step, and the share of waiting."""

    step_s: float
    wait_share: float

    @classmethod
    def of(cls, how: Circumstances) -> Measured:
        """The measurement of these settings. Waiting for the GIL counts, too, because it slows the loop itself."""
        window = how.window
        gil_s = min(how.gil_wait_s, window.loop_s) if how.shares_gil else 0.0
        return cls(window.period_s, (window.wait_s + gil_s) / max(1e-12, window.period_s))

    @property
    def wait_s(self) -> float:
        """The time in a step that the loop waits."""
        return self.step_s * self.wait_share

    def __str__(self) -> str:
        return f"{milliseconds(self.step_s)} ms a step, wait {percent(self.wait_share)}"


class Tuner:
    """Searches for settings.

    Threads that place batches call `look`, one at a time. The training thread reads `proposal`, gives up its
    pipeline, and resets it. Until then the proposal stays, so an interrupt in between loses nothing.

    Attributes:
      proposal: settings to go on with; None: those in use.
      history: what came of each trial, the latest 32 sentences.
    """

    def __init__(self, bounds: Bounds, start: Settings) -> None:
        self.proposal: Settings | None = None
        self.history: collections.deque[str] = collections.deque(maxlen=_MAX_HISTORY)
        self._bounds, self._start = bounds, start
        self._search = self._searches(start)
        self._asked = next(self._search)  # the settings that were proposed last
        self._searching = True

    @property
    def settled(self) -> bool:
        """Whether the search has ended, and its result is in use."""
        return not self._searching and self.proposal is None

    def look(self, how: Circumstances) -> None:
        """Judge the settings in use by batches that were made with them, and propose others that may be better."""
        if self.proposal is not None:
            return
        if how.settings != self._asked:  # the last proposal has not been taken up
            self.proposal = self._asked
            return
        batches = how.window.batches
        count, span_s = len(batches), batches[-1].taken - batches[0].taken
        if count >= _ENOUGH_BATCHES or (count >= _MIN_BATCHES and span_s >= _MIN_S):
            self._asked = self._search.send(how)
            self.proposal = None if self._asked == how.settings else self._asked

    def without_workers(self, error: Exception) -> Tuner:
        """After workers failed: a tuner that proposes the first settings, and does not try workers again."""
        bounds = dataclasses.replace(self._bounds, tunable=self._bounds.tunable - {"workers"})
        tuner = Tuner(bounds, self._start)
        tuner.proposal, tuner.history = self._start, self.history
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_ERROR_LENGTH)  # in one line
        tuner._note(f"goes back to threads {self._start.threads}: workers failed with {reason}")
        return tuner

    def _searches(self, best: Settings) -> Generator[Settings, Circumstances]:
        """Yields settings to go on with, and is sent batches that were made with them."""
        pause_s = _PAUSE_S
        how = yield best
        while True:
            best, before, ended = yield from self._trials(how)
            self._searching = False
            while True:
                how = yield best
                if self._is_crowded(how):  # for example since the file is in the page cache
                    self._note(f"goes back to threads {self._bounds.cores}: they kept more cores busy")
                    best = best._replace(threads=self._bounds.cores)
                    continue
                found = Measured.of(how)
                # the time of a step does not tell: training itself may slow down, and a loop that became faster
                # than its input has shorter steps
                waits_longer = found.wait_s - before.wait_s > _LONGER_WAIT * found.step_s
                if waits_longer and how.window.ended >= ended + pause_s:
                    break
            self._note(f"searches again: {found}, before {before}")
            self._searching = True
            pause_s *= 2

    def _trials(self, how: Circumstances) -> Generator[Settings, Circumstances, tuple[Settings, Measured, float]]:
        """One search: yields settings to try. Returns the best, what they gave, and when the search ended."""
        best, measured, ended = how.settings, Measured.of(how), how.window.ended
        tried = [best]
        in_vain: list[set[str]] = []  # names of settings whose change from `best` was no gain

        def may_try(settings: Settings) -> bool:
            useful = settings not in tried and {*Change.of(best, settings, 0.0).then} not in in_vain
            return useful and self._bounds.allow(settings)

        while measured.wait_share > LITTLE and len(tried) <= MAX_CHANGES:
            limited = dataclasses.replace(how, cores=min(how.cores, self._bounds.cores))
            found = best_settings(limited, self._bounds.tunable, may_try, max_threads=_MAX_THREADS)
            if found is None:
                break
            trial = found[0]
            tried.append(trial)
            change = Change.of(best, *found)
            self._note(f"tries {change}: {measured}")
            seen = yield trial
            gave, ended = Measured.of(seen), seen.window.ended
            if self._is_crowded(seen) or gave.step_s > (1 - _MIN_GAIN) * measured.step_s:
                self._note(f"{change} is no clear gain: {gave}, before {measured}")
                in_vain.append({*change.then})
                continue
            self._note(f"keeps {change}: {gave}, before {measured}")
            best, measured, how, in_vain = trial, gave, seen, []
        why = "the loop hardly waits" if measured.wait_share <= LITTLE else f"tried {len(tried) - 1} settings"
        settings = ", ".join(f"{name} {getattr(best, name)}" for name in sorted(self._bounds.tunable))
        self._note(f"stays with {settings}: {measured}; {why}")
        return best, measured, ended

    def _is_crowded(self, how: Circumstances) -> bool:
        """Whether threads keep more cores busy than they may."""
        cores, window = self._bounds.cores, how.window
        return how.settings.threads > cores and window.mean("cpu_s") > 1.1 * cores * window.period_s

    def _note(self, sentence: str) -> None:
        self.history.append(sentence)
        _log.info("tuning %s", sentence)
