"""Ctrl-C that is neither lost nor fatal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01


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

    Its message is empty on all processes but the one that is to print it.

    Attributes:
      number: the signal's.
    """

    def __init__(self, message: str, number: int) -> None:
        self.number = number
        super().__init__(message)
