"""`Life`: the part of a feed that starts runs, takes from them, and gives them up."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from feedline._src.agreement.in_step import Place
from feedline._src.agreement.monitor import failure, out_of_step
from feedline._src.build import build
from feedline._src.building import asked_hooks, changed
from feedline._src.errors import ProcessError
from feedline._src.feed_options import FeedOptions
from feedline._src.listen.listening import FeedListener
from feedline._src.listen.tokens import TokenCounts
from feedline._src.options import Settings
from feedline._src.order.schedule import Cursor
from feedline._src.prefetch.handover import INSIDE, Closed
from feedline._src.record import Counters
from feedline._src.run import Loops, Placed, Run, Runs, Sizes, Stages, close_all, run_of
from feedline._src.runtime.ending import exits
from feedline._src.runtime.threads import ProcessBound, SingleThread
from feedline._src.state import digest

if TYPE_CHECKING:
    from feedline._src.listen.diagnosis import DiagnosingPipeline

MOMENT_S = 1.0
"""Grace period for threads that have nothing left to do."""
_CLOSED = "the feed is closed; build a new one, and set_state of this one's get_state() to go on"
_AT_EXIT = (
    "feeds are closed when the interpreter exits, and that begins once the main thread has ended; join the "
    "threads that use a feed before that"
)


class Delivered(NamedTuple):
    """Batches delivered over all resumes, the place after the last of them, and a stream's state there."""

    step: int
    cursor: Cursor
    lanes: dict[str, Any] | None


class Life(ProcessBound):
    """The state of a feed, and the run that reads ahead of it."""

    def _build(self, options: FeedOptions) -> None:
        super().__init__()
        self._options = changed(options)
        self._asked = asked_hooks()
        self._sizes = build(self._options)  # what the feed is made of, for each batch size
        self._stages = self._sizes.first  # of the run in use
        self._delivered = Delivered(0, Cursor(0, 0), None)  # replaced whole, when a batch is delivered
        self._exhausted = False  # the pass is over; `iter` begins the next
        self._closed = False
        self._released = False  # the source was closed
        self._loops = Loops()
        self._single_thread = SingleThread()  # next, seek and set_state
        # reads ahead of the last batch delivered; None while there is none, or one is being taken from
        self._run: Run[Placed] | DiagnosingPipeline | None = None
        self._counted = Counters()
        self._more_bytes = 0  # placed more than if all batches had had the size of the last one
        self._listener = FeedListener(self._stages)
        self._token_counts = TokenCounts()
        self._diagnosed: DiagnosingPipeline | None = None  # while a context of `diagnose` is open
        self._moved_from: Place | None = None  # where it was before `seek` or `set_state`, until the next batch
        self._runs = Runs()
        weakref.finalize(self, close_all, self._runs.alive).atexit = False

    @property
    def _next_stages(self) -> Stages:
        """The stages of the next batch, which may have another size than the last one."""
        return self._sizes.at(self._delivered.step) if self._sizes.changes else self._stages

    def _take(self) -> tuple[Run[Placed] | DiagnosingPipeline, Placed]:
        """The next item, and its run. If there is none, one is started after the last batch delivered.

        The feed has no run until that item is delivered. So after an interrupt, or several, the next call starts
        another one, as this one may not have been started, or may have lost an item.
        """
        try:
            run, self._run = self._run, None
            run = run or self._start()
            return run, run.take()
        except StopIteration as end:
            dropped = self._counted.dropped_rows + end.value
            self._counted, self._exhausted = self._counted._replace(dropped_rows=dropped), True
            step, cursor, _ = self._delivered
            self._loops.ended(step, cursor, self._stages.access.next_pass(cursor))
            raise StopIteration from None
        except Closed:
            raise failure() or ValueError(_AT_EXIT if exits() and not self._closed else _CLOSED) from None
        except Exception as error:
            tuner, chosen = self._listener.tuner, self._stages.settings.workers > 0
            job_failed = isinstance(error, ProcessError)
            if job_failed or not chosen or tuner is None or not tuner.does_without_workers(error):
                raise
            # the user asked for no workers, so threads read again from the last batch delivered. If it is the
            # data that is bad, they raise the same error
            self._tune(tuner.start)
            return self._take()

    def _check_not_taking(self) -> None:
        """Raise if `next` was called inside of `next`, on the same thread.

        The stack says so, and not an attribute, which an interrupt could leave set.
        """
        frame: FrameType | None = sys._getframe()
        calls, code = 0, type(self).__next__.__code__  # type: ignore[attr-defined]
        while frame is not None:
            calls += frame.f_code is code and frame.f_locals["self"] is self
            frame = frame.f_back
        if calls > 1:
            raise ValueError(INSIDE)

    def _tune(self, settings: Settings) -> None:
        """Go on with other settings: the next run starts after the last batch delivered."""
        self._stages = self._stages.tuned(settings)
        self._stop(0, reads=False)
        self._listener.changed(self._stages)  # last: after an interrupt before it, all of this is done again

    def _use(self, stages: Stages) -> None:
        """Go on with batches of another size: the next run starts after the last batch delivered."""
        if stages is self._stages:
            return
        self._stop(0, reads=False)
        self._listener.changed(stages)
        self._stages.access.buffers.staging.close()
        more = self._stages.placement.local_bytes - stages.placement.local_bytes
        # last: after an interrupt before it, all of this is done again
        self._more_bytes, self._stages = self._more_bytes + self._counted.batches * more, stages

    def _reweigh(self, sizes: Sizes) -> None:
        """Go on with other weights of a mixture; there is no run."""
        new = sizes.at(self._delivered.step)
        self._stages = dataclasses.replace(self._stages, access=new.access, fingerprint=new.fingerprint)
        self._listener.changed(self._stages)
        self._sizes = sizes

    def _start(self) -> Run[Placed]:
        # compare where `seek` or `set_state` went with where other processes went; a move on the spot is none
        in_step, place = self._stages.in_step, self._place()
        if in_step is not None and self._moved_from not in (None, place) and (found := in_step.moved(place)):
            raise out_of_step(found)
        self._moved_from = None
        step, cursor, lanes = self._delivered
        run = run_of(self._stages, cursor, lanes, self._listener, step)
        self._runs.add(run, workers=self._stages.settings.workers > 0)
        self._check_open()  # another thread may have closed the feed in the meantime
        run.start()  # only now that close() can find it
        return run

    def _place(self) -> Place:
        stages = self._next_stages
        cursor = stages.access.next_cursor(self._delivered.cursor)
        order = stages.fingerprint["order"] if stages.in_step is not None else None
        mixed = isinstance(order, Mapping) and "phases" in order
        return Place(self._delivered.step, *cursor, digest(order) if mixed else "")

    def _stop(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Give up the run. Wait for its threads and those of older ones: the name of one that is stuck."""
        self._run = None
        return self._runs.stop(timeout_s, reads=reads)

    def _go_to(
        self, delivered: Delivered, restored: tuple[int, Cursor] | None = None, weighted: Sizes | None = None
    ) -> None:
        with self._single_thread:
            self._check_open()
            if self._diagnosed is not None:
                raise ValueError(
                    "a feed stays where it is while it is diagnosed; leave the context of diagnose first"
                )
            stages = self._sizes.at(delivered.step) if self._sizes.changes else self._stages
            stages.access.check_cursor(delivered.cursor)
            moved_from = self._moved_from or self._place()
            self._stop(MOMENT_S, reads=False)
            self._use(stages)
            if weighted is not None:
                self._reweigh(weighted)
            self._loops.moved(restored)
            self._listener.interrupted()
            self._moved_from = moved_from
            self._delivered, self._exhausted = delivered, False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(_CLOSED)
        self._check_not_forked()
