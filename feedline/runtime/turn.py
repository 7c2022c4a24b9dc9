"""One thread at a time: another one is refused, and nobody waits."""

from __future__ import annotations

import threading


class Turn:
    """A context that one thread may be inside. The others get a ValueError.

    No lock: an interrupt that lands right before its release would leave it held for ever. A turn belongs to a
    thread, so the one that was interrupted there can take it again.
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

    def __exit__(self, *exception: object) -> None:
        self._holder.pop("thread", None)
