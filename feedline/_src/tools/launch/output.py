"""Copies the output of processes to the launcher's own, on threads that may block without harm."""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import IO, NamedTuple, cast

from feedline._src.tools.launch.lines import Lines

_CHUNK = 1 << 16  # The capacity of a pipe.
_PIECE = 1 << 12  # Each one that is written shows that somebody reads. A pipe has room again for a page at a time.
# How long the output is read after all processes have ended: a process outside the group may hold a pipe open.
_DRAIN_S = 1.0


class Stream(NamedTuple):
    """One pipe of one process, and the file descriptor to which its lines are written."""

    pipe: IO[bytes]
    lines: Lines
    target: int


class Output:
    """Copies the lines of some pipes, on a thread of its own, until all of them have ended.

    A write blocks while nobody reads the other end, as a pager does. Then this thread blocks, and with it the
    processes that write more, but not the thread that supervises them.

    Made, started and finished by one thread. It owns the pipes from `start` on.

    Attributes:
      ended: becomes readable when the thread ends.
      written_bytes: so far.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.written_bytes = 0
        self.ended, self._finish = socket.socketpair()
        self._streams = streams
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="feedline-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """All processes have ended: the thread copies what is still in the pipes, and ends. Does not wait."""
        self.ended.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """After its end. Raises the `OSError` of a write, such as `BrokenPipeError`, if there was one."""
        self.ended.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for stream in self._streams:
                    selector.register(stream.pipe, selectors.EVENT_READ, stream)
                self._copy(selector)
        except OSError as error:
            self._error = error
        finally:
            for stream in self._streams:
                stream.pipe.close()
            self._finish.close()

    def _copy(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._finish, selectors.EVENT_READ)
        until: float | None = None
        while len(selector.get_map()) > (until is None):
            ready = selector.select(None if until is None else max(0.0, until - time.monotonic()))
            for key, _ in ready:
                if key.data is not None:
                    self._copy_chunk(selector, key)
                else:
                    selector.unregister(self._finish)
                    until = time.monotonic() + _DRAIN_S
            if until is not None and time.monotonic() >= until:
                break
        for key, _ in selector.select(0):
            if key.data is not None:
                self._copy_chunk(selector, key)
        for key in selector.get_map().values():
            if key.data is not None:
                self._write(key.data.target, key.data.lines.end())

    def _copy_chunk(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        stream = cast(Stream, key.data)
        chunk = os.read(key.fd, _CHUNK)
        self._write(stream.target, stream.lines.add(chunk) if chunk else stream.lines.end())
        if not chunk:
            selector.unregister(key.fileobj)

    def _write(self, descriptor: int, text: bytes) -> None:
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            write(descriptor, piece)
            self.written_bytes += len(piece)


def outputs(streams: Sequence[Stream]) -> list[Output]:
    """An output for each file that is written, so that one nobody reads does not block the other.

    If both descriptors are the same file, one thread writes it, since the lines of two might be mixed.
    """
    by_file: dict[object, list[Stream]] = {}
    for stream in streams:
        by_file.setdefault(_file(stream.target), []).append(stream)
    return [Output(of_file) for of_file in by_file.values()]


def _file(descriptor: int) -> object:
    try:
        status = os.fstat(descriptor)
    except OSError:  # It is closed, which the first write reports.
        return descriptor
    return status.st_dev, status.st_ino


def write(descriptor: int, text: bytes) -> None:
    """Writes all bytes without Python's buffers, which would try again at exit to write what failed."""
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # Another program has made the terminal non-blocking.
            select.select([], [descriptor], [])
