"""Warnings about loops that get less than a whole pass of a feed: each is given once a feed."""

from __future__ import annotations

from feedline._src.errors import warn
from feedline._src.order.schedule import Cursor


class Loops:
    """Knows where `iter` began to loop, and where `set_state` went to. For one thread at a time.

    Steps are batches delivered.
    """

    def __init__(self) -> None:
        self._began: int | None = None  # the step at which `iter` began to loop over this pass
        self._restored: tuple[int, Cursor] | None = None  # the latest state that was set
        self._warned_of_going_on = self._warned_of_an_empty_pass = False

    def moved(self, restored: tuple[int, Cursor] | None = None) -> None:
        """The feed went elsewhere: by `set_state` to `restored`, or else by `seek`."""
        self._began, self._restored = None, restored

    def stopped(self) -> None:
        """`next` raised: at the end of the pass, or an error after which a loop goes on, as it should."""
        self._began = None

    def begins(self, step: int, cursor: Cursor, epochs: int | None) -> None:
        """`iter` was called: warn if it was before in this pass, and batches were taken since.

        A `next` before any `iter` says that the feed is meant as an iterator. And so is one without an end.
        """
        if self._began is None:
            self._began = step
        elif step > self._began and epochs is not None and not self._warned_of_going_on:
            self._warned_of_going_on = True
            warn(
                f"this loop goes on in the middle of a pass: {step - self._began} of its batches were taken since "
                "iter(feed) or a loop began it, and are not seen here. To begin the pass again, call "
                f"feed.seek({cursor.epoch // epochs * epochs}) before the loop; to go on without this warning, "
                "take batches by next(feed)"
            )

    def ended(self, step: int, cursor: Cursor, following: Cursor) -> None:
        """The pass is over, and the next one begins at `following`: warn if a loop since `set_state` got none."""
        empty = self._began is not None and self._restored == (step, cursor)
        if empty and not self._warned_of_an_empty_pass:
            self._warned_of_an_empty_pass = True
            warn(
                f"this loop gets no batch: the state was saved at the end of a pass, in epoch {cursor.epoch}, and "
                "the next loop begins the next pass. A loop over epochs around it must count the pass that is "
                "over, for epoch in range(feed.epoch, epochs), with feed.epoch read after set_state; or leave it "
                f"out, feed.seek({following.epoch}), and for epoch in range({following.epoch}, epochs)"
            )
