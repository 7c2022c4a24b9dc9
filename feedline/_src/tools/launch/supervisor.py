"""Runs one command as several processes: their output, signals, deadlines and ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import functools
import os
import select
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from feedline._src.agreement.monitor import blamed_process
from feedline._src.tools.launch.process_group import FORWARDED, ProcessGroup

_DRAIN_S = 1.0  # a process outside of the group may hold a pipe open for longer
_MAX_LINE = 1 << 16
_REMEMBERED_LINES = 20
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TIMED_OUT = 124  # the exit code of `timeout`


class Supervisor:
    """Runs `command` once for each environment, shows the output of all, and waits for all of them.

    1. Output is written in whole lines, to the stream it came from, each with its label. While nobody reads it, as
       in a pager, processes that write more wait; signals and deadlines still count.
    2. When a process fails, the others get SIGTERM, and SIGKILL `grace_s` later; then, after all other output, its
       last lines are shown again.
    3. SIGINT, SIGTERM and SIGHUP are passed on, unless they were ignored when this began, as under nohup. After
       SIGINT or SIGTERM the processes may save and end; `stop_s` later, or at the second signal, they are killed.
    4. After `timeout_s` the processes get SIGTERM, as if it had been sent to the launcher.
    5. No process is left, however this ends (see `ProcessGroup`).
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        grace_s: float = 5.0,
        stop_s: float = 60.0,
        timeout_s: float | None = None,
        *,
        label: str = "number",
    ) -> None:
        self._command = command
        self._environments = environments
        self._grace_s = grace_s
        self._stop_s = stop_s
        self._timeout_s = timeout_s
        self._label = label
        self._running: dict[int, asyncio.SubprocessTransport] = {}
        self._started: list[asyncio.SubprocessTransport] = []
        self._codes: dict[int, int] = {}  # of the processes that have ended, in this order
        self._last = [deque[bytes](maxlen=_REMEMBERED_LINES) for _ in environments]
        self._blamed: dict[int, tuple[int, bool]] = {}  # by process: which other one it named last, see there
        self._signals: list[int] = []  # those that were passed on
        self._timed_out: list[int] = []  # the processes that had not ended after timeout_s
        self._overdue = False  # some had not ended when the kill timer fired
        self._kill_timer: asyncio.TimerHandle | None = None  # set once they have been asked to end
        self._pipes = 0  # that are open
        self._writes: set[asyncio.Task[None]] = set()
        self._unread: OSError | None = None  # why the output cannot be written

    def run(self) -> int:
        """Call it from the main thread.

        Returns:
          The exit code: 0 if all succeeded; else that of the first process that failed, or 128 + s if signal s
          killed it. 124 if `timeout_s` was over, even if the processes then ended with 0. As in a shell, 127 if
          there is no such command, 126 if it cannot be run. 128 + SIGPIPE if the reader of the output is gone.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended, self._progress = asyncio.Event(), asyncio.Event()
        out = asyncio.Lock()
        self._locks = {1: out, 2: out if _same_file() else asyncio.Lock()}
        with self._handlers(loop), ProcessGroup() as self._group:
            try:
                for index, environ in enumerate(self._environments):
                    child = functools.partial(_Child, self, index)
                    group, no_input = self._group.pid, asyncio.subprocess.DEVNULL
                    await loop.subprocess_exec(
                        child, *self._command, env=environ, stdin=no_input, process_group=group
                    )
            except OSError as error:
                code, message = cannot_start(self._command, error)
            else:
                if self._timeout_s is not None:
                    loop.call_later(self._timeout_s, self._time_out)
                await self._ended.wait()
                self._group.signal(signal.SIGKILL)  # children that the processes have left
                await self._drain()
                code, message = self._result()
            if message and self._unread is None:
                self._write(2, f"feedline launch: {message}\n".encode())
                await asyncio.wait(self._writes)
            for each in self._started:
                each.close()
            await asyncio.sleep(0)  # until they are
        return 128 + signal.SIGPIPE if isinstance(self._unread, BrokenPipeError) else code

    async def _drain(self) -> None:
        """Wait until all output is written, however late it is read; not for a pipe that a daemon holds open."""
        while self._pipes or self._writes:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), _DRAIN_S)
            except TimeoutError:
                if not self._writes:
                    return

    @contextlib.contextmanager
    def _handlers(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Handle signals in the loop. If SIGCHLD is ignored, the kernel forgets how a child ended."""
        numbers = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *numbers)}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in numbers:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _signal(self, number: int) -> None:
        self._group.signal(number)
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(child.get_pid()) != self._group.pid:  # it has left the group
                    child.send_signal(number)

    def _forward(self, number: int) -> None:
        if self._ended.is_set() and number in _ENDING_SIGNALS:  # nobody reads the rest of the output
            os._exit(self._result()[0] or 128 + number)
        self._signals.append(number)
        ending = sum(passed in _ENDING_SIGNALS for passed in self._signals)
        if ending:
            self._kill_after(self._stop_s)
        self._signal(signal.SIGKILL if ending > 1 else number)

    def _time_out(self) -> None:
        if self._running and self._kill_timer is None:
            self._timed_out = list(self._running)
            self._kill_after(self._stop_s)
            self._signal(signal.SIGTERM)

    def _kill_after(self, seconds: float) -> None:
        if self._kill_timer is None:
            self._kill_timer = asyncio.get_running_loop().call_later(seconds, self._kill)

    def _kill(self) -> None:
        self._overdue = bool(self._running)
        self._signal(signal.SIGKILL)

    def started(self, index: int, child: asyncio.SubprocessTransport) -> None:
        self._running[index] = child
        self._started.append(child)
        self._pipes += 2

    def show(self, index: int, target: int, lines: Sequence[bytes], pipe: asyncio.ReadTransport | None) -> None:
        """Write lines of a process; no more is read from the pipe until that is done."""
        label = label_of(index, self._label).encode()
        labelled = [label + line + b"\n" for line in lines]
        self._blamed.update((index, found) for line in lines if (found := blamed_process(line)))
        self._last[index].extend(labelled)
        self._write(target, b"".join(labelled), pipe)

    def pipe_closed(self) -> None:
        self._pipes -= 1
        self._progress.set()

    def exited(self, index: int, code: int) -> None:
        del self._running[index]
        if code and not any(self._codes.values()):
            if self._kill_timer is None:
                self._signal(signal.SIGTERM)
            self._kill_after(self._grace_s)
        self._codes[index] = code
        if len(self._codes) == len(self._environments):
            self._ended.set()

    def _write(self, target: int, text: bytes, pipe: asyncio.ReadTransport | None = None) -> None:
        if pipe is not None:
            pipe.pause_reading()

        async def write() -> None:
            try:
                async with self._locks[target]:
                    if self._unread is None:
                        await asyncio.to_thread(_write_all, target, text)  # blocks while nobody reads
            except OSError as error:
                self._unread = error
                self._signal(signal.SIGKILL)
            if pipe is not None and not pipe.is_closing():
                pipe.resume_reading()
            self._progress.set()

        task = asyncio.ensure_future(write())
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _result(self) -> tuple[int, str]:
        """The exit code, and what to say about it."""
        processes = len(self._environments)
        late = f"{self._stop_s:g} s {{}}; --stop-s gives more" if self._overdue else ""
        if self._timed_out:
            indices = ", ".join(map(str, self._timed_out))
            return _TIMED_OUT, (
                f"stopped after {self._timeout_s:g} s (--timeout-s); process {indices} of {processes} had not "
                f"ended{late and ', nor ' + late.format('after SIGTERM')}. The last lines of process "
                f"{self._timed_out[0]}:{self._last_lines(self._timed_out[0])}"
            )
        failed = next((index for index, code in self._codes.items() if code), None)
        if failed is None:
            return 0, ""
        cause, silent = self._blamed.get(failed, (failed, False))
        if silent and cause in self._codes and self._codes[failed] == -signal.SIGABRT:
            return 128 + signal.SIGABRT, (
                f"process {cause} of {processes} was silent, so that jax ended process {failed}; the others were "
                f"stopped. Its last lines:{self._last_lines(cause)}"
            )
        if silent or not self._codes.get(cause):
            cause = failed
        code = self._codes[cause]  # also of process 0, which ends last, since it holds what all say
        message = f"process {cause} of {processes} {_ending(code, asked=bool(self._signals))}"
        if self._signals:
            names = ", ".join(signal.Signals(number).name for number in self._signals)
            message += f", after {names} had been passed on{late and ' and ' + late.format('had gone by')}"
        elif processes > 1:
            message += f"; the others were stopped. Its last lines:{self._last_lines(cause)}"
        return code if code > 0 else 128 - code, message

    def _last_lines(self, index: int) -> str:
        return "".join(f"\n{line.decode(errors='replace').rstrip()}" for line in self._last[index])


class _Child(asyncio.SubprocessProtocol):
    def __init__(self, supervisor: Supervisor, index: int) -> None:
        self._supervisor = supervisor
        self._index = index
        self._rest = {1: b"", 2: b""}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._supervisor.started(self._index, self._transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        if lines:
            pipe = cast(asyncio.ReadTransport, self._transport.get_pipe_transport(fd))
            self._supervisor.show(self._index, fd, lines, pipe)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._rest[fd]:
            self._supervisor.show(self._index, fd, [self._rest[fd]], None)
        self._supervisor.pipe_closed()

    def process_exited(self) -> None:
        self._supervisor.exited(self._index, self._transport.get_returncode() or 0)


def _write_all(descriptor: int, text: bytes) -> None:
    """Write without Python's buffers, which would try again at exit to write what failed."""
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [descriptor], [])


def _same_file() -> bool:
    """Whether both outputs are one file, in which lines of two threads might be mixed."""
    with contextlib.suppress(OSError):  # one is closed, which its first write reports
        return os.path.sameopenfile(1, 2)
    return False


def label_of(process: int, label: str) -> str:
    """What stands before a line of this process that is written now."""
    now = f"{datetime.datetime.now():%H:%M:%S.%f}"[:-3]  # milliseconds
    return {"number": f"[{process}] ", "slurm": f"{process}: ", "time": f"[{process} {now}] ", "none": ""}[label]


def _ending(code: int, *, asked: bool) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = "; the kernel sends it when memory runs out" if code == -signal.SIGKILL and not asked else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}{hint})"


def cannot_start(command: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code, as that of a shell, and the message."""
    fix = "try whether it runs without the launcher, and raise limits if there are too many (ulimit -n, ulimit -u)"
    if error.errno in (errno.ENOENT, errno.EACCES):
        fix = "correct it, or give its path, or its interpreter first, as in `-- python train.py`"
    return (
        127 if error.errno == errno.ENOENT else 126,
        f"cannot run {shlex.quote(command[0])}: {error.strerror}; {fix}",
    )
