"""One launch while it runs: output, signals, ends, and the clock, waited for at once."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from feedline.cluster.group import Group
from feedline.cluster.lines import Lines, recent

_CHUNK = 1 << 16  # All that a pipe holds.
# How long the output of processes that are gone is waited for: one that left the group may hold it open.
_LEFT_OPEN_S = 1.0
_STDOUT, _STDERR = 1, 2
_ENDS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """One pipe of one process, and where its lines go."""

    lines: Lines
    to: int


class Run:
    """Starts the processes of one launch and sees them through to the end of the last.

    The first failure ends the others: they get SIGTERM, and SIGKILL `grace_s` later. After SIGTERM or
    SIGINT to the launcher all get it, and SIGKILL `stop_s` later, or with the second signal. Called by one
    thread, which owns `group` and `signals` and closes them afterwards.
    """

    def __init__(self, group: Group, signals: socket.socket, grace_s: float, stop_s: float) -> None:
        self._group = group
        self._signals = signals
        self._grace_s = grace_s
        self._stop_s = stop_s
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # Those not yet seen to have ended.
        self._last: list[deque[bytes]] = []  # The newest lines of each.
        self._passed_on: list[int] = []
        self._failed: tuple[int, int] | None = None  # The first: its index and return code.
        self._overdue = False  # Whether the deadline passed before the last ended.
        self._deadline: float | None = None  # Set while what was told to end may still do so.

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Runs the command once for each environment; returns the exit code (see `launch`)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            try:
                self._start(command, environments, selector)
            except OSError as error:
                return _cannot_run(command, error)
            while self._running:
                self._wait(selector, self._left())
                self._reap()
                if self._left() == 0:
                    self._overdue = bool(self._running)
                    self._kill()
            self._kill()
            self._drain(selector)
        return self._report(len(environments))

    def _start(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        selector: selectors.BaseSelector,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for index, environ in enumerate(environments):
            child = self._group.start(command, environ)
            self._running[index] = child
            self._last.append(recent())
            for pipe, to in ((child.stdout, _STDOUT), (child.stderr, _STDERR)):
                assert pipe is not None
                stream = _Stream(Lines(index, self._last[index]), to)
                selector.register(pipe, selectors.EVENT_READ, stream)

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _wait(self, selector: selectors.BaseSelector, timeout_s: float | None) -> None:
        """Handles what comes first, output or signals."""
        for key, _ in selector.select(timeout_s):
            if key.data is None:
                for number in self._signals.recv(_CHUNK):
                    self._pass_on(number)
                continue
            chunk = os.read(key.fd, _CHUNK)
            _write(key.data.to, key.data.lines.add(chunk) if chunk else key.data.lines.end())
            if not chunk:
                selector.unregister(key.fileobj)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Shows what the processes wrote last; they are gone, so it lies in the pipes."""
        selector.unregister(self._signals)
        self._deadline = time.monotonic() + _LEFT_OPEN_S
        while selector.get_map() and self._left():
            self._wait(selector, self._left())
        self._wait(selector, 0)
        for key in selector.get_map().values():
            _write(key.data.to, key.data.lines.end())

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        self._passed_on.append(number)
        ends = sum(passed in _ENDS for passed in self._passed_on)
        if ends == 1 and self._deadline is None:
            self._deadline = time.monotonic() + self._stop_s
        self._group.signal(signal.SIGKILL if ends > 1 else number)

    def _reap(self) -> None:
        for index, child in list(self._running.items()):
            code = child.poll()
            if code is None:
                continue
            del self._running[index]
            if code != 0 and self._failed is None:
                self._failed = (index, code)
                if self._deadline is None:
                    self._deadline = time.monotonic() + self._grace_s
                if not self._passed_on:  # They have been told already.
                    self._group.signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._deadline = None
        self._group.signal(signal.SIGKILL)

    def _lines(self, index: int) -> str:
        return "".join(f"\n{line.decode(errors='replace')[:-1]}" for line in self._last[index])

    def _report(self, processes: int) -> int:
        if self._failed is None:
            return 0
        index, code = self._failed
        told = f"feedline launch: process {index} of {processes} {_ended(code)}"
        if self._passed_on:
            names = ", ".join(signal.Signals(number).name for number in self._passed_on)
            told += f", after {names} had been passed on"
            told += f" and {self._stop_s:g} s had gone by; --stop-s gives more" if self._overdue else ""
        elif silent := silent_ones(self._last[index]):
            index = silent[0]
            who = ", ".join(map(str, silent))
            first = self._failed[0]
            told = (
                f"feedline launch: process {who} of {processes} was silent: it did not end, but sent no "
                f"heartbeats, for which jax ended process {first}; the others were stopped. Its last lines:"
            ) + self._lines(index)
        elif processes > 1:
            told += f"; the others were stopped. Its last lines:{self._lines(index)}"
        _write(_STDERR, f"{told}\n".encode())
        return code if code > 0 else 128 - code


def silent_ones(lines: Sequence[bytes]) -> list[int]:
    """The processes that jax misses, by what it writes when it ends one for that.

    Example:
      >>> silent_ones([b"[0] unhealthy (stopped sending heartbeats):\\n", b"[0] 1\\n", b"[0] The tasks have\\n"])
      [1]
    """
    found = re.search(rb"stopped sending heartbeats\):\n((?:\[\d+\] \S*?\d+\n)+)", b"".join(lines))
    return [int(task) for task in re.findall(rb"(\d+)\n", found[1])] if found else []


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = "; the kernel sends it when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}{hint})"


def _cannot_run(command: Sequence[str], error: OSError) -> int:
    found = not isinstance(error, FileNotFoundError)
    fix = "make it executable, or name its interpreter first" if found else "correct it, or give its path"
    told = f"feedline launch: cannot run {shlex.quote(command[0])}: {error.strerror}; {fix}"
    _write(_STDERR, f"{told}, as in `-- python train.py`\n".encode())
    return 126 if found else 127


def _write(descriptor: int, text: bytes) -> None:
    """All of it, past Python's own buffers: what cannot be written must not be tried again at exit."""
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # A terminal that another program has set so.
            select.select([], [descriptor], [])
