"""Confines an iterator to the process that built it, and to one thread at a time."""

from __future__ import annotations

import os
import threading
from typing import ClassVar, NoReturn


class ProcessBound:
    """Refuses to pickle or copy an iterator that holds threads and open files, and to use it in a forked process.

    Attributes:
      _name: the name of the iterator in error messages.
      _instead: what to do instead of copying it, for error messages.
    """

    _name: ClassVar[str]
    _instead: ClassVar[str]

    def __init__(self) -> None:
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} can be neither pickled nor copied, since it holds threads and open files; "
            f"{self._instead}"
        )

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_not_forked(self) -> None:
        if self._is_forked():
            raise ValueError(
                f"{self._name} works in the process that built it, {self._process}, and this is {os.getpid()}, a "
                "fork of it: threads, JAX's too, do not survive a fork. Start the process by "
                f'multiprocessing.get_context("spawn"), and there {self._instead}'
            )


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
        return bool(self._holder)

    def __exit__(self, *exception: object) -> None:
        self._holder.pop("thread", None)
