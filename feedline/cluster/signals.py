"""Signals as something to wait for beside files: bytes in a socket."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def caught(numbers: Sequence[int]) -> Iterator[socket.socket]:
    """While the block runs, each of these signals does no more than put its number into the socket.

    A signal that is ignored at the start stays ignored, as nohup wants it. Handlers are put back at
    the end. For the main thread, as everything with signals.

    Example:
      >>> with caught([signal.SIGUSR1]) as numbers:
      ...     signal.raise_signal(signal.SIGUSR1)
      ...     signal.Signals(numbers.recv(1)[0]).name
      'SIGUSR1'
    """
    ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = {number: signal.signal(number, _let_pass) for number in ours}
        # A full socket has enough to wake up its reader.
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _let_pass(number: int, frame: object) -> None:
    """The number is in the socket before this is called."""
