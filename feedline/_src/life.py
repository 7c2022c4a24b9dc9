"""`Life`: the part of a feed that starts and stops its runs, and that moves it to another place."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from feedline._src import state as states
from feedline._src.agreement.in_step import Place
from feedline._src.agreement.monitor import out_of_step
from feedline._src.build import build, moved, reweighted
from feedline._src.feed_options import FeedOptions, asked_hooks, changed
from feedline._src.listen.listening import FeedListener
from feedline._src.listen.tokens import TokenCounts
from feedline._src.options import Settings, checked_integer
from feedline._src.order.schedule import Cursor
from feedline._src.prefetch.pipelines import Run
from feedline._src.record import Counters
from feedline._src.run import Placed, Placer, Runs, Sizes, Stages, run_of
from feedline._src.runtime.threads import ProcessBound, SingleThread

if TYPE_CHECKING:
    from feedline._src.listen.diagnosis import DiagnosingPipeline

MOMENT_S = 1.0
"""Grace period for threads that have nothing left to do."""
CLOSED = "the feed is closed; build a new one, and set_state of this one's get_state() to go on"


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
        self._loop_began: int | None = None  # the step at which `iter` began to loop over this pass
        self._single_thread = SingleThread()  # next, seek and set_state
        # reads ahead of the last batch delivered; None while there is none, or one is being taken from
        self._run: Run[Placed] | None = None
        self._counted = Counters()
        self._listener = FeedListener(self._stages)
        self._token_counts = TokenCounts()
        self._diagnosed: DiagnosingPipeline | None = None  # while a context of `diagnose` is open
        self._moved_from: Place | None = None  # where it was before `seek` or `set_state`, until the next batch
        self._runs = Runs()
        weakref.finalize(self, self._runs.close).atexit = False

    def set_state(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from a state: the next batch begins with the first row that was not delivered.

        Another topology, mesh, batch size, number of epochs, remainder, threads or workers is fine. With random
        access the state's position is at most the number of rows, where its epoch ends.

        Args:
          state: what `get_state` returned, perhaps after a round trip through JSON.
          allow: fields of its fingerprint that may differ: "rows", "spec", "data", "order", "format".

        Raises:
          ValueError: the state was saved over other data (the message names the field), lies beyond the data,
            or contradicts itself.
        """
        weighted = self._sizes.reweighted(lambda access: access.with_weights_of(*states.order_and_position(state)))
        step, cursor = states.check(state, weighted.at(self._delivered.step).fingerprint, allow)
        access, lanes = self._stages.access, None
        if access.owners:
            lanes = states.check_lanes(state, len(access.owners), [str(lane) for lane in access.local_lanes])
        self._go_to(Delivered(step, cursor, lanes), weighted)

    def seek(self, epoch: int, position: int = 0) -> None:
        """Go to a place in the data: the next batch begins there, or with the next epoch if none is left.

        `step` is kept.

        Args:
          epoch: at least 0.
          position: in the epoch's order, at most the number of rows: there the epoch ends. Streams have no random
            access: only 0.

        Raises:
          ValueError: there is no such place; the message names the largest position.
        """
        epoch = checked_integer("epoch", epoch, at_least=0)
        position = checked_integer("position", position, at_least=0)
        if max(epoch, position) >= 1 << 63:
            raise ValueError(
                f"seek takes an epoch and a position below 2^63, got epoch {epoch}, position {position}"
            )
        if position and self._stages.access.owners:
            raise ValueError(
                f"a stream can seek to the start of an epoch only, got position {position}; use set_state"
            )
        states.check_position(position, self._stages.fingerprint["rows"])
        self._go_to(Delivered(self._delivered.step, Cursor(epoch, position), None))

    def start(self) -> None:
        """Begin to read ahead, if the feed does not yet: the first `next` then waits less.

        Call it after `set_state` and before the model is restored or compiled. Without it the first `next` begins.
        At the end of a pass it does nothing.

        Raises:
          ValueError: the feed is closed.
          ProcessError: with several processes, another one went to another place by `seek` or `set_state`.
        """
        with self._single_thread:
            self._check_open()
            if self._run is None and not self._exhausted:
                self._use(self._next_stages)
                self._run = self._start()

    def move(self, sharding: Any) -> None:
        """Go on on another mesh of the same processes, as from eight devices to six: the rows stay the same.

        The next batch begins with the first row that was not delivered. With several processes, all of them call
        it after the same batch. The batch size must suit the new mesh. Batches that were placed ahead are dropped,
        and their rows read again.

        Args:
          sharding: as of the feed.

        Raises:
          ValueError, TypeError: the sharding does not suit the batch, or other processes own its devices. The feed
            goes on where it was.
          ProcessError: processes move to other meshes, or after other batches.

        Example:
          >>> import jax, numpy as np
          >>> from feedline import Feed, Order
          >>> feed = Feed(np.arange(48), 12, jax.devices()[0], order=Order(shuffle=False))
          >>> first = next(feed)
          >>> feed.move(jax.devices()[-1])
          >>> second = next(feed)
          >>> second.tolist()[0], second.devices() == {jax.devices()[-1]}
          (12, True)
          >>> feed.close()
        """
        with self._single_thread:
            self._check_may_move("stays on its mesh")
            options, sizes = moved(self._sizes, self._options, sharding, self._place())
            self._stop(MOMENT_S, reads=False)  # a stream's next iterator may share state with the one that reads
            stages = sizes.at(self._delivered.step)
            self._use(stages if stages.bounds is None else stages.tuned(self._stages.settings))
            self._sizes, self._options = sizes, options

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of a `feedline.Mixture` from the next batch on.

        They are part of the state, so a feed that is restored to it goes on with them. Phases of weights that
        begin later stay. With several processes, all of them call it after the same batch. Batches that were
        placed ahead are dropped, and other rows read.

        Args:
          weights: by name, with any sum.

        Raises:
          TypeError, ValueError: the source is no endless mixture, or the weights do not suit it. The feed goes on
            as it was.
          ProcessError: processes give other weights, or after other batches.

        Example:
          >>> import jax, numpy as np
          >>> from feedline import Feed, Mixture
          >>> mixture = Mixture({"a": {"x": np.zeros(9)}, "b": {"x": np.ones(9)}}, weights={"a": 1, "b": 1})
          >>> feed = Feed(mixture, 8, jax.devices()[0])
          >>> int(next(feed)["source"].sum())
          4
          >>> feed.set_weights({"a": 1, "b": 3})
          >>> int(next(feed)["source"].sum())
          6
          >>> feed.close()
        """
        with self._single_thread:
            self._check_may_move("keeps its weights")
            sizes = reweighted(self._sizes, self._options, weights, self._place())
            self._stop(MOMENT_S, reads=False)
            self._use(self._next_stages)
            stages = self._reweighted(sizes, self._delivered.step)
            self._listener.changed(stages)
            self._stages, self._sizes = stages, sizes

    @property
    def _next_stages(self) -> Stages:
        """The stages of the next batch, which may have another size than the last one."""
        return self._sizes.at(self._delivered.step) if self._sizes.changes else self._stages

    def _tune(self, settings: Settings) -> None:
        """Go on with other settings: the next run starts after the last batch delivered."""
        self._stages = self._stages.tuned(settings)
        # a stream's next iterator may share state with the one that reads
        self._stop(MOMENT_S if self._stages.access.owners else 0, reads=False)
        self._listener.changed(self._stages)  # last: after an interrupt before it, all of this is done again

    def _use(self, stages: Stages) -> None:
        """Go on with batches of another size: the next run starts after the last batch delivered."""
        if stages is self._stages:
            return
        self._stop(0, reads=False)
        self._listener.changed(stages)
        self._stages.access.buffers.staging.close()
        self._stages = stages  # last: after an interrupt before it, all of this is done again

    def _reweighted(self, sizes: Sizes, step: int) -> Stages:
        """The stages after `step` batches with the weights of `sizes`, and with the settings in use."""
        new = sizes.at(step)
        if sizes.changes:
            return new
        return dataclasses.replace(self._stages, access=new.access, fingerprint=new.fingerprint)

    def _start(self) -> Run[Placed]:
        # compare where `seek` or `set_state` went with where other processes went; a move on the spot is none
        in_step, place = self._stages.in_step, self._place()
        if in_step is not None and self._moved_from not in (None, place) and (found := in_step.moved(place)):
            raise out_of_step(found)
        self._moved_from = None
        _, cursor, lanes = self._delivered
        run = run_of(self._stages, cursor, lanes, Placer(self._stages, self._listener))
        self._runs.add(run, workers=self._stages.settings.workers > 0)
        self._check_open()  # another thread may have closed the feed in the meantime
        run.start()  # only now that close() can find it
        return run

    def _place(self) -> Place:
        stages = self._next_stages
        cursor = stages.access.next_cursor(self._delivered.cursor)
        order = stages.fingerprint["order"] if stages.in_step is not None else None
        mixed = isinstance(order, Mapping) and "phases" in order
        return Place(self._delivered.step, *cursor, states.digest(order) if mixed else "")

    def _stop(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Give up the run. Wait for its threads and those of older ones: the name of one that is stuck."""
        self._run = None
        return self._runs.stop(timeout_s, reads=reads)

    def _go_to(self, delivered: Delivered, weighted: Sizes | None = None) -> None:
        with self._single_thread:
            self._check_may_move("stays where it is")
            stages = self._sizes.at(delivered.step) if self._sizes.changes else self._stages
            stages.access.check_cursor(delivered.cursor)
            moved_from = self._moved_from or self._place()
            self._stop(MOMENT_S, reads=False)
            self._use(stages)
            sizes = self._sizes
            if weighted is not None:
                sizes, stages = weighted, self._reweighted(weighted, delivered.step)
                self._listener.changed(stages)
            self._loop_began = None
            self._listener.interrupted()
            self._moved_from = moved_from
            # last, and at once: an interrupt comes before all or after all
            self._sizes, self._stages, self._delivered, self._exhausted = sizes, stages, delivered, False

    def _check_may_move(self, kept: str) -> None:
        self._check_open()
        if self._diagnosed is not None:
            raise ValueError(f"a feed {kept} while it is diagnosed; leave the context of diagnose first")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)
        self._check_not_forked()
