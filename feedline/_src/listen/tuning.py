"""Finds values for the settings of a feed that are "auto", while the feed is used.

A search tries what the report advises: the settings with which the loop is predicted to wait least. If a trial
makes a step at least 3 % shorter, the search continues from the trial's settings. A search ends when the loop
hardly waits, when no change promises a gain, or after 12 trials.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import textwrap
from collections.abc import Generator

from feedline._src.bounds import Bounds
from feedline._src.listen.report import Change
from feedline._src.listen.verdict import Circumstances, best_settings
from feedline._src.listen.words import milliseconds, percent
from feedline._src.options import Settings

_log = logging.getLogger("feedline")
LITTLE = 0.02  # up to this wait share, nothing is changed
MAX_CHANGES = 12  # the most trials of one search; after them, the best settings are used
_MIN_GAIN = 0.03  # a trial is kept if a step became shorter by at least this share
_LONGER_WAIT = 0.2  # a new search begins if the wait grew by more than this share of a step
_MIN_BATCHES, _MIN_S, _ENOUGH_BATCHES = 32, 5.0, 128  # judge after 32 batches and five seconds, or after 128
_PAUSE_S = 60.0  # minimum time between two searches; it doubles with each search
_MAX_THREADS = 64
_MAX_HISTORY = 32
_MAX_ERROR_LENGTH = 200


class Tuner:
    """Searches for settings.

    Threads that place batches call `look`, one at a time, while there is no proposal. The training thread reads
    `proposal`, starts another pipeline, and only then resets `proposal`, so that no interrupt loses a proposal.

    Attributes:
      proposal: the settings to change to; None: keep the present ones.
      history: the latest 32 sentences about trials and their results.
    """

    def __init__(self, bounds: Bounds, start: Settings) -> None:
        self.proposal: Settings | None = None
        self.history: collections.deque[str] = collections.deque(maxlen=_MAX_HISTORY)
        self._bounds, self._start = bounds, start
        self._search = self._searches(start)
        self._asked = next(self._search)  # the settings of the latest proposal
        self._searching = True

    @property
    def settled(self) -> bool:
        """Whether the search has ended, and its result is in use."""
        return not self._searching and self.proposal is None

    def look(self, how: Circumstances) -> None:
        """Judge the settings in use by batches that were made with them, and propose others that may be better."""
        if how.settings != self._asked:  # the latest proposal was not put into use: propose it again
            self.proposal = self._asked
            return
        batches = how.window.batches
        count, span_s = len(batches), batches[-1].taken - batches[0].taken
        if count >= _ENOUGH_BATCHES or (count >= _MIN_BATCHES and span_s >= _MIN_S):
            self._asked = self._search.send(how)
            self.proposal = None if self._asked == how.settings else self._asked

    def without_workers(self, error: Exception) -> Tuner:
        """Return a tuner to use after workers failed: it proposes the first settings, and never tries workers."""
        bounds = dataclasses.replace(self._bounds, tunable=self._bounds.tunable - {"workers"})
        tuner = Tuner(bounds, self._start)
        tuner.proposal, tuner.history = self._start, self.history
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_ERROR_LENGTH)  # in one line
        reason = "".join(filter(str.isprintable, reason))  # SVG allows no control characters
        tuner._note(f"goes back to threads {self._start.threads}: workers failed with {reason}")
        return tuner

    def moved(self, bounds: Bounds, settings: Settings) -> Tuner:
        """Return a tuner to use after a move to a mesh with other bounds. It begins with `settings`."""
        tunable = bounds.tunable & self._bounds.tunable  # without workers, if they failed
        tuner = Tuner(dataclasses.replace(bounds, tunable=tunable), settings)
        tuner.history, tuner._start = self.history, bounds.within(self._start)  # not `settings`: may have workers
        return tuner

    def _searches(self, settings: Settings) -> Generator[Settings, Circumstances]:
        """Yields settings to use, and receives `Circumstances` of batches that were made with these settings."""
        pause_s = _PAUSE_S
        how = yield settings
        while True:
            best, ended = yield from self._trials(how)
            settings = best.settings
            self._searching = False
            while True:
                how = yield settings
                if self._is_crowded(how):  # for example, because the file is in the page cache by now
                    self._note(f"goes back to threads {self._bounds.cores}: more threads kept too many cores busy")
                    settings = settings._replace(threads=self._bounds.cores)
                    continue
                # compare waits, not steps, because training itself may slow down, and because a loop that became
                # faster than its input has shorter steps, but waits longer
                waits_longer = how.lost_s - best.lost_s > _LONGER_WAIT * how.window.period_s
                if waits_longer and how.window.ended >= ended + pause_s:
                    break
            self._note(f"searches again: {_shown(how)}, before {_shown(best)}")
            self._searching = True
            pause_s *= 2

    def _trials(self, best: Circumstances) -> Generator[Settings, Circumstances, tuple[Circumstances, float]]:
        """One search: yields settings to try; returns the `Circumstances` of the best ones, and the end time."""
        ended = best.window.ended
        tried = [best.settings]
        in_vain: list[set[str]] = []  # sets of settings whose joint change was no gain

        def may_try(settings: Settings) -> bool:
            useful = settings not in tried and {*Change.of(best.settings, settings, 0.0).then} not in in_vain
            return useful and self._bounds.allow(settings)

        while _lost_share(best) > LITTLE and len(tried) <= MAX_CHANGES:
            limited = dataclasses.replace(best, cores=min(best.cores, self._bounds.cores))
            found = best_settings(limited, self._bounds.tunable, may_try, max_threads=_MAX_THREADS)
            if found is None:
                break
            tried.append(found[0])
            change = Change.of(best.settings, *found)
            self._note(f"tries {change}: {_shown(best)}")
            trial = yield found[0]
            ended = trial.window.ended
            gains = trial.window.period_s <= (1 - _MIN_GAIN) * best.window.period_s
            if gains and not self._is_crowded(trial):
                self._note(f"keeps {change}: {_shown(trial)}, before {_shown(best)}")
                best, in_vain = trial, []
            else:
                self._note(f"{change} is no clear gain: {_shown(trial)}, before {_shown(best)}")
                in_vain.append({*change.then})
        why = "the loop hardly waits" if _lost_share(best) <= LITTLE else f"tried {len(tried) - 1} settings"
        names = sorted(self._bounds.tunable)
        settings = ", ".join(f"{name} {getattr(best.settings, name)}" for name in names)
        self._note(f"stays with {settings}: {_shown(best)}; {why}")
        return best, ended

    def _is_crowded(self, how: Circumstances) -> bool:
        """Whether the feed's threads keep more cores busy than they may."""
        cores, window = self._bounds.cores, how.window
        return how.settings.threads > cores and window.mean("cpu_s") > 1.1 * cores * window.period_s

    def _note(self, sentence: str) -> None:
        self.history.append(sentence)
        _log.info("tuning %s", sentence)


def _lost_share(how: Circumstances) -> float:
    return how.lost_s / max(1e-12, how.window.period_s)


def _shown(how: Circumstances) -> str:
    """Example: 40.5 ms a step, wait 75 %."""
    return f"{milliseconds(how.window.period_s)} ms a step, wait {percent(_lost_share(how))}"
