"""Ctrl-C and SIGTERM: none is lost, none breaks an import, and the program cleans up after each."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_RAISE_AFTER_S = 0.01


@contextlib.contextmanager
def interrupts_get_through() -> Iterator[None]:
    """Raise an interrupt again if Python would only print it and continue.

    Python raises KeyboardInterrupt wherever the main thread is. An exception in a finalizer, or in the callback
    that JAX registers for garbage collections, cannot propagate: Python passes it to `sys.unraisablehook`, and the
    program continues. An exception raised in that hook would be dropped too, so the hook sets an alarm that raises
    the interrupt after the callback. The alarm is SIGALRM, so only a program may call this, in its main thread.
    """
    lost: list[BaseException] = []

    def raise_again(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is raise_later.__code__:  # the hook still runs, or runs again for another finalizer
                signal.setitimer(signal.ITIMER_REAL, _RAISE_AFTER_S)
                return
            frame = frame.f_back
        raise lost.pop() if lost else KeyboardInterrupt

    def raise_later(unraisable: UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
            lost.append(unraisable.exc_value)
            signal.setitimer(signal.ITIMER_REAL, _RAISE_AFTER_S)
        else:
            usual_hook(unraisable)

    usual_hook = sys.unraisablehook
    usual_handler = signal.signal(signal.SIGALRM, raise_again)
    sys.unraisablehook = raise_later
    try:
        yield
    finally:
        sys.unraisablehook = usual_hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual_handler)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay interrupts of this thread until the block ends.

    For imports: an interrupt while a C++ library is initialised becomes an ImportError, or crashes the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Terminated(SystemExit):
    """Raised at SIGTERM, or at SIGHUP of a closed terminal, so that `finally` blocks clean up."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("terminated")


class EndedBySignal(KeyboardInterrupt):
    """Raised when a signal ends the program without a failure. The message is empty in all processes but one."""

    def __init__(self, message: str, number: int) -> None:
        self.number = number
        super().__init__(message)


@contextlib.contextmanager
def terminations_raise() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM or SIGHUP; the second one ends this process at once.

    Signals that this process ignores, such as SIGHUP under `nohup`, stay ignored.
    """
    usual = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]

    def restore() -> None:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)

    def terminate(number: int, frame: FrameType | None) -> None:
        restore()
        raise Terminated(number)

    for number in usual:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        restore()
