"""The `feedline launch` command: starts a command as several JAX processes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import io
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Annotated, Any, Literal

import tyro

from feedline._src.agreement.monitor import blamed_process
from feedline._src.cluster.detect import PRINTERS
from feedline._src.cluster.launchers.launcher import Job
from feedline._src.errors import FeedError
from feedline._src.options import checked_integer, checked_seconds
from feedline._src.tools.cli.options import flags_for_cpu_devices
from feedline._src.tools.process_group import FORWARDED, process_group

_MAX_LINE = 1 << 16
_REMEMBERED_LINES = 20
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a command as several JAX processes on this machine.

    The command goes last, after --, and calls feedline.cluster.initialize() to join the processes:

        feedline launch --processes 4 --cpu -- python train.py --steps 100

    Each line of output begins with the index of its process. If a process fails, the launcher ends the others,
    shows the last lines of the failed one again, and exits with its code, or with 128 + s if signal s killed it.
    Ctrl-C and SIGTERM are forwarded; a second one kills the processes. No process outlives the launcher.

    On several hosts, srun, mpirun, Kubernetes or PBS starts the processes. To print the command or file
    that starts them:

        feedline launch --processes 8 --hosts 4 --print slurm -- python train.py
    """

    processes: int
    """Number of processes; with --hosts, on each host."""
    cpu: bool = False
    """Run on the CPU."""
    devices_per_process: int | None = None
    """With --cpu: CPU devices of each process; by default as XLA_FLAGS says. Without --cpu: GPUs of each process;
    by default an equal share, or one with --print."""
    grace_s: float = 5.0
    """Seconds that the other processes may take to exit after the first failure, before they are killed."""
    stop_s: float = 60.0
    """Seconds that the processes may take to save and exit after Ctrl-C or SIGTERM, before they are killed."""
    print_for: Annotated[Literal["slurm", "mpirun", "jobset", "pbs"] | None, tyro.conf.arg(name="print")] = None
    """Start nothing: print the srun command, the mpirun command (Open MPI), the manifest of a JobSet, or a script
    for qsub."""
    hosts: str | None = None
    """With --print: the number of hosts, or their names, as in dgx1,dgx2; by default 1."""
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """The command, after --."""

    def run(self) -> int:
        """Launch or print. Returns the exit code. `ValueError`: an option is wrong, or the command cannot run."""
        if not self.command:
            raise ValueError("launch needs a command after --, found none; for example -- python train.py")
        checked_integer("--processes", self.processes, at_least=1)
        if self.devices_per_process is not None:
            checked_integer("--devices-per-process", self.devices_per_process, at_least=1)
        for name, seconds in {"--grace-s": self.grace_s, "--stop-s": self.stop_s}.items():
            if seconds:  # 0: kill at once
                checked_seconds(name, seconds)
        if self.print_for:
            print(PRINTERS[self.print_for](self._job()).rstrip("\n"))
            return 0
        if self.hosts:
            fix = "--print slurm, mpirun, jobset or pbs prints how to start them on several hosts"
            raise ValueError(f"launch starts processes on this machine only, found --hosts {self.hosts}; {fix}")
        with reserved_port() as port:
            environments = process_environments(
                os.environ, self.processes, f"127.0.0.1:{port}", self.cpu, self.devices_per_process
            )
            return Supervisor(environments, self.grace_s, self.stop_s).run(self.command)

    def _job(self) -> Job:
        hosts = self.hosts or "1"
        names = () if re.fullmatch("[0-9]{1,6}", hosts) else tuple(hosts.split(","))
        count = len(names) or int(hosts)
        if not count or not all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9.-]*", name) for name in names):
            raise ValueError(f"--hosts must be a number above 0, or names such as dgx1,dgx2, found {hosts!r}")
        variables = {"PYTHONUNBUFFERED": "1"}  # as in process_environments
        if self.cpu:
            variables["JAX_PLATFORMS"] = "cpu"
            if self.devices_per_process:
                variables["XLA_FLAGS"] = flags_for_cpu_devices("", self.devices_per_process)
        gpus = 0 if self.cpu else self.devices_per_process or 1
        return Job(self.command, count, names, self.processes, gpus, variables)


def process_environments(
    environ: Mapping[str, str], processes: int, coordinator: str, cpu: bool, devices_per_process: int | None
) -> list[dict[str, str]]:
    """The environment variables of each process. `ValueError` if there are too few GPUs."""
    common = {
        # Otherwise Python buffers what it writes into a pipe, and the last output of a killed process is lost.
        "PYTHONUNBUFFERED": "1",
        **environ,
        "FEEDLINE_COORDINATOR": coordinator,
        "FEEDLINE_PROCESSES": str(processes),
        "FEEDLINE_LOCAL_PROCESSES": str(processes),  # They share this host's cores.
    }
    gpus, share = list[str](), 0
    if cpu or environ.get("JAX_PLATFORMS") == "cpu":
        common["JAX_PLATFORMS"] = "cpu"
        if devices_per_process is not None:
            common["XLA_FLAGS"] = flags_for_cpu_devices(environ.get("XLA_FLAGS", ""), devices_per_process)
            common.pop("JAX_NUM_CPU_DEVICES", None)  # It would override the flag.
    elif devices_per_process is not None or processes > 1:
        # Without CUDA_VISIBLE_DEVICES, a process sees the GPUs that have a device file.
        numbers = ",".join(map(str, range(len(glob.glob("/dev/nvidia[0-9]*")))))
        gpus = list(filter(None, environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")))
        share = devices_per_process or len(gpus) // processes
        if processes * share > len(gpus) or (gpus and not share):
            raise ValueError(
                f"Each GPU belongs to one process: {processes} processes with {share or 1} GPUs each were asked "
                f"for, found {len(gpus)} GPUs ({','.join(gpus)}); ask for fewer processes or GPUs, or use --cpu"
            )
    environments = []
    for process in range(processes):
        own = {**common, "FEEDLINE_PROCESS": str(process)}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[process * share : (process + 1) * share])
            own.pop("JAX_LOCAL_DEVICE_IDS", None)  # It may name GPUs that are no longer visible.
        environments.append(own)
    return environments


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port that the kernel gives to no other program while the block runs.

    The port is bound with SO_REUSEPORT. jax's coordinator uses this option, too, so it can listen on the port.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        yield port.getsockname()[1]


class Supervisor:
    """Runs a command once for each environment, shows the output of the processes, and waits for them to end.

    Each output stream of a process is copied by its own thread; other threads wait for signals or for the end of
    a process. They all queue calls for the main thread. Only the main thread makes decisions and sends signals.
    While nobody reads the output, as in a pager, a process that writes more is blocked, but signals and deadlines
    still take effect. A signal that was ignored when the launcher started, as under nohup, is not forwarded.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], grace_s: float, stop_s: float) -> None:
        self._environments = environments
        self._grace_s = grace_s
        self._stop_s = stop_s
        self._calls = queue.SimpleQueue[Callable[[], None]]()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}  # exit codes, in the order in which the processes ended
        self._copying = 0  # how many streams have not ended
        self._last = [deque[bytes](maxlen=_REMEMBERED_LINES) for _ in environments]
        # {process p: (the process that p's output last named as failed or silent, whether it was silent)}
        self._blamed: dict[int, tuple[int, bool]] = {}
        self._signals: list[signal.Signals] = []  # the forwarded ones
        self._kill_at: float | None = None  # the deadline, once the processes have been asked to end
        self._overdue = False  # whether processes were killed at the deadline
        self._over, self._ends = os.pipe()  # `_ends` is closed once all processes have ended, which wakes readers
        self._broken: dict[int, OSError] = {}  # {1 or 2: why this output can no longer be written}
        out = threading.Lock()
        self._writing = {1: out, 2: out if os.path.sameopenfile(1, 2) else threading.Lock()}

    def run(self, command: Sequence[str]) -> int:
        """Run the command until all processes have ended, and return the exit code. Only for the main thread.

        ValueError: the command cannot be run. FeedError: the output cannot be written.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel discards exit codes
        # Python runs handlers only once the main thread stops waiting, so a pipe reports signals to another thread
        caught, catching = os.pipe()
        os.set_blocking(catching, False)
        signal.set_wakeup_fd(catching)
        threading.Thread(target=self._queue_signals, args=(caught,), daemon=True).start()
        self._handle(lambda *_: None)
        with process_group() as self._group:
            for index in range(len(self._environments)):
                self._start(index, command)
            self._make_calls()
            if self._broken and not self._asked_to_end():
                return _without_output(next(iter(self._broken.values())))
            code, message = self._result()
            if message:
                self._handle(lambda *_: os._exit(code))  # the write below blocks while nobody reads
                self._write(2, f"feedline launch: {message}\n".encode())
        return code

    def _start(self, index: int, command: Sequence[str]) -> None:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        environ, group = self._environments[index], self._group
        try:
            child = subprocess.Popen(
                command, env=environ, stdin=null, stdout=pipe, stderr=pipe, process_group=group
            )
        except OSError as error:
            fix = "check that it runs without the launcher, as in python train.py"
            raise ValueError(f"cannot run {command[0]}: {error.strerror}; {fix}") from error
        self._running[index] = child
        self._copying += 2
        for task in (
            lambda: self._call(self._ended, index, child.wait()),
            lambda: self._copy(index, 1, child.stdout),
            lambda: self._copy(index, 2, child.stderr),
        ):
            threading.Thread(target=task, daemon=True).start()

    def _handle(self, handler: Callable[..., None]) -> None:
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    def _queue_signals(self, caught: int) -> None:
        while number := os.read(caught, 1):
            self._call(self._forward, signal.Signals(number[0]))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._calls.put(lambda: function(*arguments))

    def _make_calls(self) -> None:
        """Make the queued calls until all processes have ended and their output is written, however slowly."""
        while self._running or self._copying:
            timeout_s = None
            if self._running and self._kill_at is not None and not self._overdue:
                timeout_s = max(0.0, self._kill_at - time.monotonic())
            try:
                self._calls.get(timeout=timeout_s)()
            except queue.Empty:
                self._overdue = True
                self._signal(signal.SIGKILL)

    def _copy(self, index: int, target: int, pipe: IO[bytes] | None) -> None:
        """Write the lines of one stream of a process; runs in a thread. Lines longer than 64 KiB are split."""
        assert pipe is not None, "Popen was asked for one"
        with pipe, io.BufferedReader(_PipeReader(pipe.fileno(), self._over)) as lines:
            while line := lines.readline(_MAX_LINE):
                labelled = b"[%d] %s\n" % (index, line.removesuffix(b"\n"))
                self._last[index].append(labelled)
                if found := blamed_process(line):
                    self._blamed[index] = found
                self._write(target, labelled)
        self._call(self._copied)

    def _copied(self) -> None:
        self._copying -= 1

    def _write(self, target: int, text: bytes) -> None:
        """Write without Python's buffers, which would repeat a failed write at exit."""
        with self._writing[target]:
            while text and target not in self._broken:
                try:
                    text = text[os.write(target, text) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    select.select([], [target], [])
                except OSError as error:
                    self._broken[target] = error
                    self._call(self._lose_output)

    def _lose_output(self) -> None:
        """Kill the processes, unless they were asked to end: then the same Ctrl-C may have ended `tee`."""
        if not self._asked_to_end():
            self._signal(signal.SIGKILL)

    def _asked_to_end(self) -> bool:
        return any(number in _ENDING_SIGNALS for number in self._signals)

    def _ended(self, index: int, code: int) -> None:
        del self._running[index]
        if code and not any(self._codes.values()):
            if self._kill_at is None:
                self._signal(signal.SIGTERM)
            self._kill_at = self._kill_at or time.monotonic() + self._grace_s
        self._codes[index] = code
        if not self._running:
            self._signal(signal.SIGKILL)  # children that were left behind
            os.close(self._ends)

    def _signal(self, number: int) -> None:
        os.killpg(self._group, number)
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpgid(child.pid) != self._group:  # it has left the group, as `timeout` does
                    child.send_signal(number)

    def _forward(self, number: signal.Signals) -> None:
        if number not in _ENDING_SIGNALS:
            self._signal(number)
        elif not self._running:  # only output that nobody reads is left
            os._exit(self._result()[0] or 128 + number)
        else:
            self._signal(signal.SIGKILL if self._asked_to_end() else number)
            self._kill_at = self._kill_at or time.monotonic() + self._stop_s
        self._signals.append(number)

    def _result(self) -> tuple[int, str]:
        """The exit code, and a message about the first failure."""
        first = failed = next((index for index, code in self._codes.items() if code), None)
        if failed is None:
            return 0, ""
        other, silent = self._blamed.get(failed, (failed, False))
        # The process that the output blames may be the cause although it ended later: process 0, for example, ends
        # last. A silent process is the cause only if jax has aborted the process that blames it (SIGABRT).
        if self._codes.get(other) and (not silent or self._codes[failed] == -signal.SIGABRT):
            failed = other
        code = self._codes[failed]
        ending = (
            f"exited with code {code}" if code > 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"
        )
        text = f"process {failed} of {len(self._codes)} {ending}"
        if self._signals:
            text += f", after {', '.join(number.name for number in self._signals)} had been forwarded"
            text += f" and {self._stop_s:g} s had passed; --stop-s allows more" if self._overdue else ""
        elif code == -signal.SIGKILL and (failed == first or not self._overdue):
            text += "; the kernel sends this signal when memory runs out"
        if not self._signals and len(self._codes) > 1:
            lines = [line.decode(errors="replace").rstrip() for line in self._last[failed].copy()]
            text = "\n".join([f"{text}; the others were stopped. Its last lines:", *lines])
        return code if code > 0 else 128 - code, text


class _PipeReader(io.RawIOBase):
    """Reads a pipe until all its writers have closed it, or until the writing end of the pipe `over` is closed.

    In the second case a daemon may still hold the first pipe open, so only the bytes already in it are read.
    """

    def __init__(self, pipe: int, over: int) -> None:
        self._pipe = pipe
        self._over = over
        self._left: int | None = None  # bytes still to read, once `over` has ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes, and read them. Returns 0 at the end."""
        if self._left is None:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            poll.register(self._over, select.POLLIN)
            if any(file == self._over for file, _ in poll.poll()):
                waiting = fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4))
                self._left = int.from_bytes(waiting, sys.byteorder)
        count = os.readv(self._pipe, [memoryview(buffer)[: self._left]])
        if self._left is not None:
            self._left -= count
        return count


def _without_output(error: OSError) -> int:
    """The exit code if the output was closed, as after SIGPIPE. `FeedError`: writing failed for another reason."""
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    raise FeedError(
        f"the output of the processes must be written, and that failed ({error.strerror}), so they were "
        "killed; make space for it, or send it elsewhere",
        stage="launch",
    )
