"""`Moves`: the part of a feed that goes elsewhere: to a state, a place, another mesh, other weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from feedline._src import state as states
from feedline._src.build import moved, reweighted
from feedline._src.life import MOMENT_S, Delivered, Life
from feedline._src.options import checked_integer
from feedline._src.order.schedule import Cursor


class Moves(Life):
    """What takes a feed elsewhere. Each is for one thread at a time, and not for a feed that is diagnosed."""

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
        self._go_to(Delivered(step, cursor, lanes), restored=(step, cursor), weighted=weighted)

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
            self._check_open()
            if self._diagnosed is not None:
                raise ValueError(
                    "a feed stays on its mesh while it is diagnosed; leave the context of diagnose first"
                )
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
            self._check_open()
            if self._diagnosed is not None:
                raise ValueError(
                    "a feed keeps its weights while it is diagnosed; leave the context of diagnose first"
                )
            sizes = reweighted(self._sizes, self._options, weights, self._place())
            self._stop(MOMENT_S, reads=False)
            self._reweigh(sizes)
