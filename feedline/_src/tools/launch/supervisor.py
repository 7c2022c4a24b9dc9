"""Runs one command as several processes: their output, signals, deadlines and ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
import select
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Mapping, Sequence

from feedline._src.agreement.monitor import blamed_process
from feedline._src.tools.process_group import FORWARDED, process_group

_DRAIN_S = 1.0  # without output, after all processes have ended: a daemon of theirs may hold a pipe open
_MAX_LINE = 1 << 16
_REMEMBERED_LINES = 20
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CANNOT_RUN = 127  # the exit code of a shell


@dataclasses.dataclass
class Supervisor:
    """Runs `command` once for each environment, shows the output of all, and waits for all of them.

    1. Output is written in whole lines, to the stream it came from, each with its label. While nobody reads it, as
       in a pager, processes that write more wait; signals and deadlines still count.
    2. When a process fails, the others get SIGTERM, and SIGKILL `grace_s` later; then, after all other output, its
       last lines are shown again.
    3. SIGINT, SIGTERM and SIGHUP are forwarded, unless they were ignored when this began, as under nohup. After
       SIGINT or SIGTERM the processes may save and end; `stop_s` later, or at the second signal, they are killed.
    4. No process is left, however this ends (see `process_group`).
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    grace_s: float
    stop_s: float
    label: str

    def __post_init__(self) -> None:
        self._running: dict[int, Process] = {}
        self._codes: dict[int, int] = {}  # of the processes that have ended, in this order
        self._tasks: list[asyncio.Task[None]] = []  # one for the end of each process
        self._copies: set[asyncio.Task[None]] = set()  # one for each stream of each process
        self._last = [deque[bytes](maxlen=_REMEMBERED_LINES) for _ in self.environments]
        self._blamed: dict[int, tuple[int, bool]] = {}  # by process: the other one that it named last
        self._signals: list[signal.Signals] = []  # those that were forwarded
        self._overdue = False  # some had not ended when the kill timer fired
        self._kill_timer: asyncio.TimerHandle | None = None  # set once they have been asked to end
        self._broken: OSError | None = None  # why output cannot be written any more

    def run(self) -> int:
        """Call it from the main thread.

        Returns:
          The exit code: 0 if all succeeded; else that of the first process that failed, or 128 + s if signal s
          killed it. 127 if the command cannot be run; 128 + SIGPIPE if the reader of the output is gone.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel forgets how a child ended
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._forward, number)
        out = asyncio.Lock()
        self._writing = {1: out, 2: out if _same_file() else asyncio.Lock()}
        with process_group() as self._group:
            try:
                for index, environ in enumerate(self.environments):
                    await self._start(index, environ)
            except OSError as error:
                fix = "try whether it runs without the launcher, as in python train.py"
                code, message = _CANNOT_RUN, f"cannot run {self.command[0]}: {error.strerror}; {fix}"
                self._signal(signal.SIGKILL)
                await asyncio.gather(*self._tasks)
            else:
                await asyncio.gather(*self._tasks)
                self._signal(signal.SIGKILL)  # children that the processes have left
                await self._drain()
                code, message = self._result()
            if message:
                await self._write(2, f"feedline launch: {message}\n".encode())
        return 128 + signal.SIGPIPE if isinstance(self._broken, BrokenPipeError) else code

    async def _start(self, index: int, environ: Mapping[str, str]) -> None:
        """Start a process. Its pipes are ours: `Process.wait` of some versions of Python waits for asyncio's."""
        outputs = {target: os.pipe() for target in (1, 2)}
        try:
            child = await asyncio.create_subprocess_exec(
                *self.command,
                env=environ,
                stdin=DEVNULL,
                stdout=outputs[1][1],
                stderr=outputs[2][1],
                process_group=self._group,
            )
        finally:
            for _, writing in outputs.values():
                os.close(writing)
        self._running[index] = child
        self._tasks.append(asyncio.create_task(self._await_end(index, child)))
        self._copies |= {
            asyncio.create_task(self._copy(index, target, reading)) for target, (reading, _) in outputs.items()
        }

    async def _await_end(self, index: int, child: Process) -> None:
        code = await child.wait()
        del self._running[index]
        if code and not any(self._codes.values()):
            if self._kill_timer is None:
                self._signal(signal.SIGTERM)
            self._kill_after(self.grace_s)
        self._codes[index] = code

    async def _copy(self, index: int, target: int, pipe: int) -> None:
        """Write the lines of one stream of a process. Nothing more is read before they are written."""
        reader = asyncio.StreamReader(_MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb", 0))
        rest = b""
        while data := await reader.read(_MAX_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            await self._show(index, target, lines)
        if rest:
            await self._show(index, target, [rest])

    async def _show(self, index: int, target: int, lines: Sequence[bytes]) -> None:
        label = label_of(index, self.label).encode()
        labelled = [label + line + b"\n" for line in lines]
        self._blamed.update((index, found) for line in lines if (found := blamed_process(line)))
        self._last[index].extend(labelled)
        await self._write(target, b"".join(labelled))

    async def _write(self, target: int, text: bytes) -> None:
        """Write in a thread, which blocks while nobody reads."""
        async with self._writing[target]:
            try:
                if self._broken is None:
                    await asyncio.to_thread(_write_all, target, text)
            except OSError as error:
                self._broken = error
                self._signal(signal.SIGKILL)

    async def _drain(self) -> None:
        """Wait until all output is written, however late it is read."""
        pending = self._copies
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_DRAIN_S)
            if not done and not any(lock.locked() for lock in self._writing.values()):
                return

    def _signal(self, number: int) -> None:
        os.killpg(self._group, number)
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpgid(child.pid) != self._group:  # it has left the group, as `timeout` does
                    child.send_signal(number)

    def _forward(self, number: signal.Signals) -> None:
        ending = number in _ENDING_SIGNALS
        if ending and len(self._codes) == len(self.environments):  # nobody reads the rest of the output
            os._exit(self._result()[0] or 128 + number)
        again = ending and any(before in _ENDING_SIGNALS for before in self._signals)
        self._signals.append(number)
        if ending:
            self._kill_after(self.stop_s)
        self._signal(signal.SIGKILL if again else number)

    def _kill_after(self, seconds: float) -> None:
        if self._kill_timer is None:
            self._kill_timer = asyncio.get_running_loop().call_later(seconds, self._kill)

    def _kill(self) -> None:
        self._overdue = bool(self._running)
        self._signal(signal.SIGKILL)

    def _result(self) -> tuple[int, str]:
        """The exit code, and a message about the first failure."""
        failed = next((index for index, code in self._codes.items() if code), None)
        if failed is None:
            return 0, ""
        cause, code, ending = self._cause(failed)
        text = f"process {cause} of {len(self._codes)} {ending}"
        if self._signals:
            text += f", after {', '.join(number.name for number in self._signals)} had been passed on"
            late = f" and {self.stop_s:g} s had gone by; --stop-s gives more"
            return code, text + (late if self._overdue else "")
        if len(self._codes) > 1:
            lines = [line.decode(errors="replace").rstrip() for line in self._last[cause]]
            text = "\n".join([f"{text}; the others were stopped. Its last lines:", *lines])
        return code, text

    def _cause(self, failed: int) -> tuple[int, int, str]:
        """The process that made this one fail, the exit code, and how that process ended."""
        other, silent = self._blamed.get(failed, (failed, False))
        if silent and other in self._codes and self._codes[failed] == -signal.SIGABRT:
            return other, 128 + signal.SIGABRT, f"was silent, so that jax ended process {failed}"
        if not silent and self._codes.get(other):  # process 0 ends last, since it holds the messages of all
            failed = other
        code = self._codes[failed]
        if code >= 0:
            return failed, code, f"exited with code {code}"
        by_kernel = code == -signal.SIGKILL and not self._signals
        hint = "; the kernel sends it when memory runs out" if by_kernel else ""
        return failed, 128 - code, f"was killed by signal {-code} ({signal.strsignal(-code)}{hint})"


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
    """The label of a line of this process that is written now."""
    now = f"{datetime.datetime.now():%H:%M:%S.%f}"[:-3]  # milliseconds
    return {"number": f"[{process}] ", "slurm": f"{process}: ", "time": f"[{process} {now}] ", "none": ""}[label]
