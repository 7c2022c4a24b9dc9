"""A context that refuses a second thread."""

from __future__ import annotations

import threading


class SingleThread:
    """A context that one thread at a time may enter. Another thread gets a ValueError and does not wait.

    It is not a lock, because an interrupt right before the release would leave a lock held for ever. The context
    belongs to a thread, so a thread that was interrupted there can enter it again.
    """

    __slots__ = ("_holder",)

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder.setdefault("thread", me) != me:
            raise ValueError(
                "a feed is for one thread at a time, and another thread is inside it; give each thread a feed of "
                "its own, or guard it by a lock"
            )

    @property
    def occupied(self) -> bool:
        """Whether a thread is inside."""
        return bool(self._holder)

    def __exit__(self, *exception: object) -> None:
        self._holder.pop("thread", None)
