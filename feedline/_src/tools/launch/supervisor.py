"""Runs one command as several processes: an event loop over their output, signals, deadlines and ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import os
import queue
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from feedline._src.agreement.monitor import failed_process
from feedline._src.tools.launch.process_group import FORWARDED, ProcessGroup

_UNREAD_S = 30.0
"""How long the end waits for a reader of the output that reads nothing more."""
_MESSAGE_S = 2.0
"""How long a message then waits, which the same reader may have to read."""
_DRAIN_S = 1.0
"""How long a pipe is read after all processes have ended: a process outside the group may hold it open."""
_CHUNK = 1 << 16  # the capacity of a pipe
_PIECE = 1 << 12  # each one that is written shows that somebody reads; a pipe has room again for a page at a time
_MAX_LINE = 1 << 16
_REMEMBERED_LINES = 20
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TIMED_OUT = 124  # the exit code of `timeout`
_EXAMPLE = ", as in `-- python train.py`"
_FIXES = {
    errno.ENOENT: f"correct it, or give its path{_EXAMPLE}",
    errno.EACCES: f"make it executable, or name its interpreter first{_EXAMPLE}",
    errno.ENOEXEC: f"make it executable, or name its interpreter first{_EXAMPLE}",
    errno.EAGAIN: "start fewer, or raise the limit of processes (`ulimit -u`, or pids.max of the control group)",
    errno.EMFILE: "the launcher may open no further file, and needs two for each process: raise `ulimit -n`",
}


class Supervisor:
    """Runs `command` once for each environment, shows the output of all, and waits for all of them.

    1. Output is written in whole lines, to the stream it came from, each with its label. While nobody reads it, as
       in a pager, processes that write more wait; signals and deadlines still count.
    2. When a process fails, the others get SIGTERM, and SIGKILL `grace_s` later; then, after all other output, its
       last lines are shown again.
    3. SIGINT, SIGTERM and SIGHUP are passed on, unless they were ignored when this began, as under nohup. After
       SIGINT or SIGTERM the processes may save and end; `stop_s` later, or at the second signal, they are killed.
    4. After `timeout_s` the processes get SIGTERM, as if it had been sent to the launcher.
    5. When all processes have ended, the rest of the output is written for as long as it is read: `_UNREAD_S`
       after the last read, or at a further signal, this says that the rest is lost, and ends.
    6. No process is left, however this ends (see `ProcessGroup`).

    After `jax.distributed.initialize`, jax catches SIGTERM and does nothing, so a program that does not call
    `feedline.cluster.should_stop` ends by SIGKILL.

    Attributes that callbacks of the loop change: `_codes` holds the return codes of the processes that have ended,
    in this order. `_kill_timer` is set once the processes have been asked to end, for whatever reason.

    Example:
      >>> Supervisor(["true"], [os.environ] * 2).run()
      0
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        grace_s: float = 5.0,
        stop_s: float = 60.0,
        timeout_s: float | None = None,
        label: str = "number",
    ) -> None:
        self._command = command
        self._environments = environments
        self._grace_s = grace_s
        self._stop_s = stop_s
        self._timeout_s = timeout_s
        self._label = label
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        self._last = [deque[tuple[bytes, bytes]](maxlen=_REMEMBERED_LINES) for _ in environments]
        self._signals: list[int] = []  # those that were passed on
        self._timed_out: list[int] = []  # the processes that had not ended after timeout_s
        self._overdue: list[int] = []  # the processes that had not ended when the kill timer fired
        self._kill_timer: asyncio.TimerHandle | None = None

    def run(self) -> int:
        """Call it from the main thread.

        Returns:
          The exit code: 0 if all succeeded; else that of the first process that failed, or 128 + s if signal s
          killed it. 124 if `timeout_s` was over, even if the processes then ended with 0. As in a shell, 127 if
          there is no such command, 126 if it cannot be run. 128 + SIGPIPE if the reader of the output is gone.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            return asyncio.run(self._run())
        except BrokenPipeError:
            return 128 + signal.SIGPIPE

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended, self._drained, self._further = (loop.create_future() for _ in range(3))
        with _writers() as self._writers, self._handlers(loop), ProcessGroup() as self._group:
            try:
                for index, environ in enumerate(self._environments):
                    self._running[index] = self._group.start(self._command, environ)
            except OSError as error:
                code, message = cannot_start(self._command, error)
                await self._tell(message, _UNREAD_S)
                return code
            if self._timeout_s is not None:
                loop.call_later(self._timeout_s, self._time_out)
            copies = [
                asyncio.ensure_future(self._copy(index, pipe, target))
                for index, child in self._running.items()
                for pipe, target in ((child.stdout, 1), (child.stderr, 2))
                if pipe is not None
            ]
            all_copies = asyncio.gather(*copies)
            try:
                return await self._supervise(all_copies)
            finally:
                for copy in copies:
                    copy.cancel()
                # Before the group closes the pipes.
                await asyncio.gather(all_copies, *copies, return_exceptions=True)

    async def _supervise(self, copies: asyncio.Future[list[None]]) -> int:
        await asyncio.wait({copies, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if copies.done():
            copies.result()  # raises the error of a write
            await self._ended
        self._group.signal(signal.SIGKILL)  # children that the processes have left
        asyncio.get_running_loop().call_later(_DRAIN_S, _settle, self._drained)
        message_s = _UNREAD_S
        if not await self._written_to_the_end(copies):
            message_s = _MESSAGE_S
            lost = "the end of the output is lost, since nobody reads it; read all of it, or write it to a file"
            await self._tell(lost, message_s)
        code, message = self._result()
        if message:
            await self._tell(message, message_s)
        return code

    @contextlib.contextmanager
    def _handlers(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Handle signals in the loop; SIGCHLD even if it is ignored, or the kernel forgets how a child ended."""
        numbers = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *numbers)}
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in numbers:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _forward(self, number: int) -> None:
        self._signals.append(number)
        ending = sum(passed in _ENDING_SIGNALS for passed in self._signals)
        if ending:
            self._kill_after(self._stop_s)
        self._group.signal(signal.SIGKILL if ending > 1 else number)
        if self._ended.done() and number in _ENDING_SIGNALS:
            _settle(self._further)

    def _reap(self) -> None:
        for index, child in list(self._running.items()):
            code = child.poll()
            if code is None:
                continue
            del self._running[index]
            if code and not any(self._codes.values()):
                if self._kill_timer is None:
                    self._group.signal(signal.SIGTERM)
                self._kill_after(self._grace_s)
            self._codes[index] = code
        if not self._running:
            _settle(self._ended)

    def _time_out(self) -> None:
        if self._running and self._kill_timer is None:
            self._timed_out = list(self._running)
            self._kill_after(self._stop_s)
            self._group.signal(signal.SIGTERM)

    def _kill_after(self, seconds: float) -> None:
        if self._kill_timer is None:
            self._kill_timer = asyncio.get_running_loop().call_later(seconds, self._kill)

    def _kill(self) -> None:
        self._overdue = list(self._running)
        self._group.signal(signal.SIGKILL)

    async def _copy(self, index: int, pipe: IO[bytes], target: int) -> None:
        """Copy one pipe until it ends, or until the output is drained; what it then still holds is the last."""
        os.set_blocking(pipe.fileno(), False)
        rest, last = b"", False
        while not last:
            if not self._drained.done():
                await self._readable(pipe)
            last = self._drained.done()
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(pipe.fileno(), _CHUNK)
                last = last or not chunk
                *lines, rest = (rest + chunk).split(b"\n")
                while len(rest) > _MAX_LINE:
                    lines.append(rest[:_MAX_LINE])
                    rest = rest[_MAX_LINE:]
                await self._write(index, lines, target)
        if rest:
            await self._write(index, [rest], target)

    async def _readable(self, pipe: IO[bytes]) -> None:
        """Wait until a pipe can be read, or until the output is drained."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(pipe, _settle, ready)
        try:
            await asyncio.wait({ready, self._drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(pipe)

    async def _write(self, index: int, lines: Sequence[bytes], target: int) -> None:
        if lines:
            label = label_of(index, self._label).encode()
            self._last[index].extend((label, line) for line in lines)
            await self._writers[target].write(target, b"".join(b"%b%b\n" % (label, line) for line in lines))

    async def _written_to_the_end(self, copies: asyncio.Future[list[None]]) -> bool:
        """Wait until all output is written, while somebody reads it. False: the rest is lost."""
        while not copies.done():
            before = [writer.pieces for writer in self._writers.values()]
            await asyncio.wait({copies, self._further}, timeout=_UNREAD_S, return_when=asyncio.FIRST_COMPLETED)
            unread = before == [writer.pieces for writer in self._writers.values()]
            if not copies.done() and (unread or self._further.done()):
                return False
        copies.result()
        return True

    async def _tell(self, message: str, timeout_s: float) -> None:
        """Write to standard error, unless nobody reads that."""
        with contextlib.suppress(OSError):  # of the write, or a TimeoutError
            text = f"feedline launch: {message}\n".encode()
            await asyncio.wait_for(self._writers[2].write(2, text), timeout_s)

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
        lines = [line for _, line in self._last[failed]]
        index = failed_process(lines)
        if index is None or not self._codes.get(index):
            index = failed  # else process 0, which ends last, since it holds what all say
        code = self._codes[index]
        message = f"process {index} of {processes} {_ending(code)}"
        if self._signals:
            names = ", ".join(signal.Signals(number).name for number in self._signals)
            message += f", after {names} had been passed on{late and ' and ' + late.format('had gone by')}"
        elif silent := silent_processes([line for _, line in self._last[index]]):
            message = (
                f"process {', '.join(map(str, silent))} of {processes} was silent: it did not end, but sent no "
                f"heartbeats, for which jax ended process {failed}; the others were stopped. Its last lines:"
                f"{self._last_lines(silent[0])}"
            )
        elif processes > 1:
            message += f"; the others were stopped. Its last lines:{self._last_lines(index)}"
        return code if code > 0 else 128 - code, message

    def _last_lines(self, index: int) -> str:
        return "".join(f"\n{(label + line).decode(errors='replace')}" for label, line in self._last[index])


class _Writer:
    """Writes to one file on a thread of its own, since a write blocks while nobody reads the other end.

    Attributes:
      pieces: how many were written.
    """

    def __init__(self) -> None:
        self.pieces = 0
        self._queue = queue.SimpleQueue[tuple[int, bytes, asyncio.Future[None]] | None]()
        threading.Thread(target=self._run, name="feedline-output", daemon=True).start()

    async def write(self, descriptor: int, text: bytes) -> None:
        """Returns when all of it is written; `OSError` of the write, such as `BrokenPipeError`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((descriptor, text, written))
        await written

    def close(self) -> None:
        """End the thread after what was given to it. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, text, written = item
            error: OSError | None = None
            try:
                for start in range(0, len(text), _PIECE):
                    _write_all(descriptor, text[start : start + _PIECE])
                    self.pieces += 1
            except OSError as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                written.get_loop().call_soon_threadsafe(_settle, written, error)


def _settle(future: asyncio.Future[None], error: OSError | None = None) -> None:
    if future.done():  # or cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _write_all(descriptor: int, text: bytes) -> None:
    """Write without Python's buffers, which would try again at exit to write what failed."""
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [descriptor], [])


@contextlib.contextmanager
def _writers() -> Iterator[dict[int, _Writer]]:
    """A writer for standard output and for standard error, so that one that nobody reads does not block the other.

    If both are the same file, they have one writer, since the lines of two threads might be mixed.
    """
    out = _Writer()
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:  # one is closed, which its first write reports
        same = False
    writers = {1: out, 2: out if same else _Writer()}
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.close()


def label_of(process: int, label: str) -> str:
    """What stands before a line of this process that is written now.

    Example:
      >>> label_of(2, "number"), label_of(2, "slurm"), label_of(2, "none")
      ('[2] ', '2: ', '')
    """
    now = f"{datetime.datetime.now():%H:%M:%S.%f}"[:-3]  # milliseconds
    return {"number": f"[{process}] ", "slurm": f"{process}: ", "time": f"[{process} {now}] ", "none": ""}[label]


def silent_processes(lines: Sequence[bytes]) -> list[int]:
    """The processes whose heartbeats jax misses, from what it writes when it ends a process for that.

    Example:
      >>> silent_processes([b"unhealthy (stopped sending heartbeats):", b"/job:jax_worker/replica:0/task:1"])
      [1]
    """
    text = b"".join(line + b"\n" for line in lines)
    match = re.search(rb"stopped sending heartbeats\):\n((?:\S*?\d+\n)+)", text)
    return [int(task) for task in re.findall(rb"(\d+)\n", match[1])] if match else []


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = "; the kernel sends it when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}{hint})"


def cannot_start(command: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code, as that of a shell, and the message.

    Example:
      >>> cannot_start(["trian"], OSError(errno.ENOENT, "No such file"))
      (127, 'cannot run trian: No such file; correct it, or give its path, as in `-- python train.py`')
    """
    program, number, reason = command[0], error.errno, error.strerror
    if number == errno.EACCES and os.sep not in program and shutil.which(program, mode=os.F_OK) is None:
        number, reason = errno.ENOENT, os.strerror(errno.ENOENT)  # the error is about a folder of PATH
    fix = _FIXES.get(number or 0, "try whether it runs without the launcher")
    if number == errno.ENOENT and shutil.which(program):
        fix = f"its first line names an interpreter that is not there; correct that, or name one first{_EXAMPLE}"
    elif number == errno.ENOENT and os.path.isfile(program):  # a name without a slash is only looked for on PATH
        path = shlex.quote(os.path.join(os.curdir, program))
        fix = f"this folder has it, but PATH does not: give its path, as in `{path}`, or its interpreter{_EXAMPLE}"
    return 127 if number == errno.ENOENT else 126, f"cannot run {shlex.quote(program)}: {reason}; {fix}"
