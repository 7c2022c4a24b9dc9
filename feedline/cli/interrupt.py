"""Ctrl-C that is neither lost nor fatal, and SIGTERM that is no worse."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_AGAIN_S = 0.01
_STDERR = 2
_NOTED = {
    signal.SIGINT: b"feedline: ends after this step; Ctrl-C again ends it at once\n",
    signal.SIGTERM: b"feedline: ends after this step; SIGTERM again ends it at once\n",
}


@contextlib.contextmanager
def interrupts_get_through() -> Iterator[None]:
    """While this is entered, an interrupt that Python would print and forget is raised again.

    Python raises KeyboardInterrupt wherever the main thread stands. In a finalizer, or in the callback
    that JAX has run at every garbage collection, it can go nowhere: it ends in `sys.unraisablehook`, and
    the program goes on. Raising it from that hook would end there too, so an alarm brings it back when
    the callback is over. Takes SIGALRM; for the main thread of a program, not for a library.

    Example:
      >>> with interrupts_get_through():
      ...     pass
    """

    def again(unraisable: UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            usual_hook(unraisable)

    usual_hook = sys.unraisablehook
    usual_handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = usual_hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual_handler)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """While this is entered, an interrupt of this thread waits; then it is raised.

    For imports: one that hits the initialisation of a C++ library turns into an ImportError there, or
    crashes the process.

    Example:
      >>> with interrupts_wait():
      ...     import json
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Ended(KeyboardInterrupt):
    """A signal ended the program, in good order.

    Attributes:
      number: the signal's.
    """

    def __init__(self, message: str, number: int) -> None:
        self.number = number
        super().__init__(message)


@contextlib.contextmanager
def ends_noted() -> Iterator[list[int]]:
    """While this is entered, the first Ctrl-C or SIGTERM is put into the list; the next one acts as usual.

    For a loop that can be left between two steps only.

    Example:
      >>> with ends_noted() as noted:
      ...     for step in range(3):
      ...         if noted:
      ...             break
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        _restore(usual)
        noted.append(number)
        with contextlib.suppress(OSError):  # what reads it, `tee` say, may have ended by the same Ctrl-C
            os.write(_STDERR, _NOTED[signal.Signals(number)])  # print is not made for signal handlers

    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _NOTED}
    usual = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in usual:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        _restore(usual)


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python does not know
