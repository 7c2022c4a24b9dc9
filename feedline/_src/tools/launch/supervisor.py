"""Supervises the processes of one launch: waits for output, signals, ends and deadlines at the same time."""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from feedline._src.agreement.failure_lines import failed_process
from feedline._src.tools.launch.lines import Label, Lines, recent_lines
from feedline._src.tools.launch.output import Output, Stream, outputs, write
from feedline._src.tools.launch.process_group import FORWARDED, ProcessGroup
from feedline._src.tools.launch.start_errors import cannot_start

_UNREAD_S = 30.0
"""How long the end waits for a reader of the output that reads nothing more."""
_MOMENT_S = 2.0
"""How long a message then waits, which the same reader may have to read."""
_SIGNALS_AT_ONCE = 1 << 10
_STDOUT, _STDERR = 1, 2
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TIMED_OUT = 124
"""The exit code when the time was over, as that of `timeout`."""


class Supervisor:
    """Starts the processes of one launch and waits until the last has ended.

    When a process fails, the others get SIGTERM, and SIGKILL `grace_s` later. After SIGTERM or SIGINT to the
    launcher, all processes get that signal, and SIGKILL `stop_s` later or at the second signal. After `timeout_s`
    they get SIGTERM as if it had been sent to the launcher. Called by one thread, which owns `group` and `signals`
    and closes them afterwards.
    """

    def __init__(
        self,
        group: ProcessGroup,
        signals: socket.socket,
        *,
        grace_s: float,
        stop_s: float,
        timeout_s: float | None = None,
        label: Label = "number",
    ) -> None:
        self._group = group
        self._signals = signals
        self._grace_s = grace_s
        self._stop_s = stop_s
        self._timeout_s = timeout_s
        self._label = label
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # Processes whose end was not seen yet.
        self._outputs: list[Output] = []
        self._last: list[deque[tuple[bytes, bytes]]] = []  # The newest lines of each process.
        self._forwarded: list[int] = []  # Signals, in the order in which they came.
        self._failed: tuple[int, int] | None = None  # Index and return code of the first process that failed.
        self._codes: dict[int, int] = {}  # The return codes of the processes that have ended.
        self._timed_out: list[int] = []  # The processes that had not ended after timeout_s.
        self._overdue = False  # Whether the deadline passed before the last process ended.
        self._deadline: float | None = None  # When to send SIGKILL; None if no process was asked to end.
        self._end: float | None = None  # When timeout_s are over; None from then on, or if there is no limit.

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Runs the command once for each environment; returns the exit code (see `launch`)."""
        sys.stdout.flush()
        sys.stderr.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            try:
                self._start(command, environments)
            except OSError as error:
                code, message = cannot_start(command, error)
                self._tell(message)
                return code
            if self._timeout_s is not None:
                self._end = time.monotonic() + self._timeout_s
            try:
                self._copy_output(selector)
                while self._running:
                    self._wait(selector, _first(self._remaining_s(), _until(self._end)))
                    self._reap()
                    if _until(self._end) == 0:
                        self._time_out()
                    if self._remaining_s() == 0:
                        self._overdue = bool(self._running)
                        self._kill()
                self._kill()
            finally:
                for output in self._outputs:
                    output.finish()
            self._await_output(selector)
        return self._report(len(environments))

    def _start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        for index, environ in enumerate(environments):
            self._running[index] = self._group.start(command, environ)

    def _copy_output(self, selector: selectors.BaseSelector) -> None:
        """Copies the output of the processes from now on. A closed pipe of ours wakes the selector."""
        streams = []
        for index, child in self._running.items():
            self._last.append(recent_lines())
            for pipe, target in ((child.stdout, _STDOUT), (child.stderr, _STDERR)):
                assert pipe is not None
                streams.append(Stream(pipe, Lines(index, self._last[index], self._label), target))
            child.stdout = child.stderr = None  # The output closes them, perhaps after the group.
        for output in outputs(streams):
            self._outputs.append(output)
            selector.register(output.ended, selectors.EVENT_READ, output)
            output.start()

    def _remaining_s(self) -> float | None:
        return _until(self._deadline)

    def _wait(self, selector: selectors.BaseSelector, timeout_s: float | None) -> None:
        """Waits for signals, or for the end of an output, and handles them."""
        for key, _ in selector.select(timeout_s):
            if key.data is None:
                for number in self._signals.recv(_SIGNALS_AT_ONCE):
                    self._forward(number)
            else:
                selector.unregister(key.fileobj)
                self._outputs.remove(key.data)
                key.data.close()

    def _await_output(self, selector: selectors.BaseSelector) -> None:
        """Waits until all output is written, while somebody reads it, and until a further signal."""
        asked, written, deadline = self._asked_to_end(), -1, 0.0
        while self._outputs and self._asked_to_end() == asked:
            if (now_written := sum(output.written_bytes for output in self._outputs)) != written:
                written, deadline = now_written, time.monotonic() + _UNREAD_S
            elif _until(deadline) == 0:
                break
            self._wait(selector, _until(deadline))
        if self._outputs:
            self._tell(
                "the end of the output is lost, since nobody reads it; read all of it, or write it to a file"
            )

    def _forward(self, number: int) -> None:
        if number not in FORWARDED:  # SIGCHLD, or another one for which the program of `launch` has a handler
            return
        self._forwarded.append(number)
        ending = self._asked_to_end()
        if ending == 1 and self._deadline is None:
            self._deadline = time.monotonic() + self._stop_s
        self._group.signal(signal.SIGKILL if ending > 1 else number)

    def _asked_to_end(self) -> int:
        """How many signals that end the processes were passed on."""
        return sum(forwarded in _ENDING_SIGNALS for forwarded in self._forwarded)

    def _reap(self) -> None:
        for index, child in list(self._running.items()):
            code = child.poll()
            if code is None:
                continue
            del self._running[index]
            self._codes[index] = code
            if code != 0 and self._failed is None:
                self._failed = (index, code)
                if self._deadline is None:
                    self._deadline = time.monotonic() + self._grace_s
                if not self._asked_to_end() and not self._timed_out:  # Otherwise they have got a signal already.
                    self._group.signal(signal.SIGTERM)

    def _time_out(self) -> None:
        self._end = None
        asked = self._failed is not None or self._asked_to_end() or self._deadline is not None
        if self._running and not asked:  # Otherwise the processes have been asked to end already.
            self._timed_out = list(self._running)
            self._deadline = time.monotonic() + self._stop_s
            self._group.signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._deadline = None
        self._group.signal(signal.SIGKILL)

    def _lines(self, index: int) -> str:
        newest = list(self._last[index])  # A copy, since the thread of an output may still add lines.
        return "".join(f"\n{(prefix + line).decode(errors='replace')}" for prefix, line in newest)

    def _tell(self, message: str) -> None:
        """Writes to standard error, unless nobody reads that."""
        text = f"feedline launch: {message}\n".encode()
        thread = threading.Thread(target=_write_if_possible, args=(text,), name="feedline-tell", daemon=True)
        thread.start()
        thread.join(_MOMENT_S if self._outputs else _UNREAD_S)

    def _report_timeout(self, processes: int) -> int:
        indices = ", ".join(map(str, self._timed_out))
        message = (
            f"stopped after {self._timeout_s:g} s (--timeout-s); process {indices} of {processes} had not ended"
        )
        message += f", nor {self._stop_s:g} s after SIGTERM; --stop-s gives more" if self._overdue else ""
        message += f". The last lines of process {self._timed_out[0]}:{self._lines(self._timed_out[0])}"
        self._tell(message)
        return _TIMED_OUT

    def _report(self, processes: int) -> int:
        if self._timed_out:
            return self._report_timeout(processes)
        if self._failed is None:
            return 0
        index, code = self._failed
        named = failed_process([line for _, line in list(self._last[index])])
        if named is not None and self._codes.get(named):  # process 0 ends last, since it holds what all say
            index, code = named, self._codes[named]
        message = f"process {index} of {processes} {_ended(code)}"
        if self._forwarded:
            names = ", ".join(signal.Signals(number).name for number in self._forwarded)
            message += f", after {names} had been passed on"
            message += f" and {self._stop_s:g} s had gone by; --stop-s gives more" if self._overdue else ""
        elif silent := silent_processes([line for _, line in list(self._last[index])]):
            index = silent[0]
            indices = ", ".join(map(str, silent))
            first = self._failed[0]
            message = (
                f"process {indices} of {processes} was silent: it did not end, but sent no "
                f"heartbeats, for which jax ended process {first}; the others were stopped. Its last lines:"
            ) + self._lines(index)
        elif processes > 1:
            message += f"; the others were stopped. Its last lines:{self._lines(index)}"
        self._tell(message)
        return code if code > 0 else 128 - code


def silent_processes(lines: Sequence[bytes]) -> list[int]:
    """The processes whose heartbeats jax misses, from what it writes when it ends a process for that.

    Example:
      >>> silent_processes([b"unhealthy (stopped sending heartbeats):", b"/job:jax_worker/replica:0/task:1"])
      [1]
    """
    text = b"".join(line + b"\n" for line in lines)
    match = re.search(rb"stopped sending heartbeats\):\n((?:\S*?\d+\n)+)", text)
    return [int(task) for task in re.findall(rb"(\d+)\n", match[1])] if match else []


def _write_if_possible(text: bytes) -> None:
    with contextlib.suppress(OSError):
        write(_STDERR, text)


def _until(moment: float | None) -> float | None:
    """Seconds until a moment of the monotonic clock; 0 if it has passed, None if there is none."""
    return None if moment is None else max(0.0, moment - time.monotonic())


def _first(*waits_s: float | None) -> float | None:
    return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = "; the kernel sends it when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}{hint})"
