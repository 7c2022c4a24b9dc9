"""Delivers signals through a socket, so that they can be waited for together with files."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def signal_socket(numbers: Sequence[int]) -> Iterator[socket.socket]:
    """While the block runs, each of these signals only writes its number into the socket.

    A signal that is ignored at the start stays ignored, so that nohup works; but not SIGCHLD, because the kernel
    would then forget how a child ended. The handlers are restored at the end. Only the main thread may call this,
    because only it may set signal handlers.

    Example:
      >>> with signal_socket([signal.SIGUSR1]) as numbers:
      ...     signal.raise_signal(signal.SIGUSR1)
      ...     signal.Signals(numbers.recv(1)[0]).name
      'SIGUSR1'
    """
    ours = [
        number for number in numbers if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
    ]
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = {number: signal.signal(number, _ignore) for number in ours}
        # If the socket is full, its reader wakes up anyway.
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _ignore(number: int, frame: object) -> None:
    """Does nothing: the interpreter has written the number into the socket before."""
