"""Ends all processes when one fails, whatever they wait for. Heartbeats show which process stops answering.

Keys in the coordination service, which process 0 stores::

    feedline/abort             the first failure: [process, arguments of the error], where process is null if it is
                               unknown which one is wrong; or "" if all processes succeeded
    feedline/left/<p>          process p ends because of that failure
    feedline/heartbeat/<p>     a value that process p changes at each beat
    feedline/status/silent     the processes whose heartbeats have stopped, as process 0 sees them
    feedline/status/ended/<g>  the first process of group g that reached its end, and its counts for the feeds that
                               this group built; with an empty g, the first of all processes
    feedline/ended/<p>         process p has reached its end
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from feedline._src.agreement.coordination import Coordination, coordination, is_unreachable, process_names
from feedline._src.agreement.in_step import counts_by_group, ends_differ, missed_move, more_than
from feedline._src.errors import FeedError, ProcessError, as_arguments

EXTRA_HEARTBEAT_S = 5.0
"""`abort_after_s` plus this is jax's heartbeat timeout, so that jax does not end a process that is merely slow."""
_ABORT, _LEFT = "feedline/abort", "feedline/left"
_HEARTBEAT, _STATUS, _ENDED = "feedline/heartbeat", "feedline/status", "feedline/ended"
_FIRST_ENDS, _SILENT = f"{_STATUS}/ended", f"{_STATUS}/silent"
_SUCCESS = ""
_BLAMED = re.compile(rb"feedline: (?:process (\d+) failed: |no answer from process(?:es)? (\d+))")
_FOREVER_S = 1e9
_BEATS = 4  # a process is silent if it missed this many beats in a row; process 0 looks once more, to be sure
_CALLS_PER_S = 500  # the maximum for all heartbeats: with thousands of processes, each beats less often
_WARN_S = 30.0  # this long after the first process has ended, the others print a line that names it
_JOIN_S = 10.0  # how long the exit waits for heartbeats in flight, and for the line that reports the failure
_OUTPUT_S = 1.0  # how long the end of this process waits for its last output
_PROCESS_0_S = 2.0  # how long process 0, which stores the keys, waits for the others to end
_UNWRITABLE = (OSError, ValueError, AttributeError)  # a full disk, a closed stream, no stream (None)
_SUCCESS_S = 300.0  # how long a process that succeeded waits for the others; jax's own barrier waits as long


class _SupportsClose(Protocol):
    def close(self) -> None: ...


_monitor: Monitor | None = None
_closed_on_abort: set[weakref.ref[_SupportsClose]] = set()
"""What to close once another process has failed, so that threads that wait in it wake up. Any thread may add to
this set, because it is read only as a copy, and copying is atomic."""


def abort(reason: str | BaseException) -> None:
    """Report to the other processes that this process has failed. They print the reason, and end.

    An uncaught exception is reported without this call. Call it before `sys.exit(1)`, which jax and feedline
    cannot distinguish from success: without the call, this process would wait at its end for the others. Only the
    first failure is reported. Without a monitor (see `initialize`), the others notice the failure only when they
    wait inside feedline. In a process that did not join others, the call is a no-op.

    Args:
      reason: a sentence, or the exception.

    Example:
      >>> abort("the disk is full")  # and then sys.exit(1)
    """
    if _monitor is not None:
        _monitor.failed = True
    if (service := coordination()) is not None:
        arguments: dict[str, Any] = {"message": str(reason)}
        if isinstance(reason, BaseException):
            arguments = as_arguments(reason)
        _report(service, arguments.pop("process", service.process), arguments)


def _report(service: Coordination, process: int | None, arguments: dict[str, Any]) -> None:
    if process is not None:
        arguments["message"] = f"process {process} failed: {' '.join(arguments['message'].split())}"
    with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
        service.set(_ABORT, json.dumps([process, arguments]))


def blamed_process(line: bytes) -> tuple[int, bool] | None:
    """Find the failed or silent process that a line of output names. Returns its index, and whether it is silent.

    Example:
      >>> blamed_process(b"feedline: process 0 failed: OSError: no space"), blamed_process(b"step 7")
      ((0, False), None)
    """
    match = _BLAMED.search(line)  # anywhere in the line, because another thread may be writing a traceback
    return match and (int(match[1] or match[2]), match[1] is None)


def out_of_step(found: str) -> ProcessError:
    """Report that processes take different batches of a feed; this ends them all. Returns the error to raise."""
    if (service := coordination()) is not None:
        _report(service, None, {"message": found, "stage": "agree"})
    return ProcessError(found, stage="agree")


def failure() -> ProcessError | None:
    return _monitor.failure if _monitor is not None else None


def poll_failure() -> ProcessError | None:
    """The failure of another process, if any. Without a monitor, this asks the coordination service."""
    if _monitor is not None and (_monitor.watches or _monitor.failure is not None):
        return _monitor.failure
    with contextlib.suppress(FeedError):
        service = coordination()
        found = service.try_get(_ABORT) if service is not None else None
        return _error_of(*json.loads(found)) if found else None
    return None


def ended_processes(service: Coordination) -> set[int]:
    """The processes with a monitor that have reached their end; empty if this process has no monitor."""
    return set(service.by_process(_ENDED)) if _monitor is not None and _monitor.one_has_ended else set()


def _error_of(process: int | None, arguments: dict[str, Any]) -> ProcessError:
    return ProcessError(**{"stage": "abort", "process": process, **arguments})


def close_on_abort(waiting: _SupportsClose) -> None:
    """Close `waiting` when another process fails; its owner then raises `failure()`."""
    _closed_on_abort.add(weakref.ref(waiting, _closed_on_abort.discard))
    if failure() is not None:
        waiting.close()


def watch(abort_after_s: float) -> None:
    global _monitor
    service = coordination()
    if service is not None and service.processes > 1 and (_monitor is None or not _monitor.watches):
        _monitor = Monitor(service, abort_after_s)
        _monitor.start()


def leave(code: int) -> NoReturn:
    """End this process after a failure, without the waits of a normal exit."""
    abort(f"it ended with exit code {code}")
    if _monitor is not None and _monitor.watches:
        _monitor.leave(code)
    _end(code)


class Monitor:
    """Waits for the failure of any process, and then ends this one. `jax.distributed.shutdown()` ends the monitor.

    A thread blocks on one key. When a process fails, the thread prints the failure, and closes what waits inside
    feedline, so the callers get the failure as an exception. After `abort_after_s`, the thread ends this process,
    because a thread inside a collective cannot be interrupted. At exit, the process waits until all have succeeded
    or one has failed; this replaces jax's shutdown barrier, which does not report failures.

    A second thread sends heartbeats until the process ends. Process 0 looks for heartbeats that have stopped; in
    the other processes, a third thread checks whether process 0 answers. A silent process is only named, since
    code that holds the GIL for long stops heartbeats, too. jax's own heartbeats come from C++; when they stop,
    jax ends the others. Silence is measured in beats, not seconds, so that a process that was itself stopped does
    not report the others.

    All threads are joined at exit: a thread that returns from jax's C++ code while the interpreter is being
    finalised would abort the process.
    """

    def __init__(self, service: Coordination, abort_after_s: float) -> None:
        self.failure: ProcessError | None = None
        self.failed = False  # this process has failed, and ends because of that
        self.one_has_ended = False
        self._service = service
        self._process = service.process
        self._abort_after_s = abort_after_s
        self._succeeded = threading.Event()  # this process has reached its end without a failure
        self._code = 1  # the exit code after a failure
        self._reported = threading.Event()  # this process has printed which process failed
        self._over = threading.Event()  # heartbeats must stop
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        self._thread = threading.Thread(target=self._await_failure, name="feedline-abort", daemon=True)
        self._beating = [threading.Thread(target=self._beat, name="feedline-heartbeat", daemon=True)]
        if self._process:
            watching = threading.Thread(target=self._watch_process_0, name="feedline-process-0", daemon=True)
            self._beating.append(watching)
        # jax beats twice per timeout, so it may end this process after half of it; a third of it is earlier
        silent_after_s = (abort_after_s + EXTRA_HEARTBEAT_S) / 3
        self._every_s = max(silent_after_s / (_BEATS + 1), 2 * service.processes / _CALLS_PER_S)
        self._beats = 0  # beats that process 0 has received
        self._last_beats: dict[int, tuple[str, int]] = {}  # in process 0: each process's last beat, its repeats
        self._silent: list[int] = []  # the silent processes, as reported last
        self._first_end_at: float | None = None
        self._ahead_at: float | None = None  # since when this process has more batches than one that has ended

    @property
    def watches(self) -> bool:  # a forked child inherits the hooks but not the thread
        return self._pid == os.getpid() and self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        with contextlib.suppress(FeedError):
            # before the first beat, so that process 0 also notices a process that never sends one
            self._service.replace(f"{_HEARTBEAT}/{self._process}", "")
        for thread in self._beating:
            thread.start()
        sys.excepthook = self._uncaught
        # at exit, this hook runs after hooks that the user registers later, and before jax's own
        atexit.register(self._at_exit)

    def leave(self, code: int) -> NoReturn:
        self._code = code
        if self.failure is not None:  # this thread may have raised the failure before the monitor prints it
            self._reported.wait(_JOIN_S)
        self._end(code, self._abort_after_s + _PROCESS_0_S)

    def _await_failure(self) -> None:
        try:
            value = self._service.get(_ABORT, _FOREVER_S)
        except FeedError as error:
            self._over.set()
            if is_unreachable(error):
                self._end_without_process_0()
            return  # jax has shut down
        if value == _SUCCESS:
            self._over.set()
            return
        deadline = time.monotonic() + self._abort_after_s + _PROCESS_0_S
        process, arguments = json.loads(value)
        self.failure = _error_of(process, arguments)
        for reference in _closed_on_abort.copy():
            if (waiting := reference()) is not None:  # `close` may hang in an iterator of the user
                _call_briefly(waiting.close)
            del waiting
        if process not in (None, self._process):
            say(str(FeedError(**arguments)), f"process {self._process} ends, too")
        elif not self.failed:  # this process left its loop early, or the processes are out of step
            self.failed = True
            say(str(FeedError(**arguments)))
        self._reported.set()
        self._succeeded.wait(self._abort_after_s)
        self._end(0 if self._succeeded.is_set() and not self.failed else self._code, deadline - time.monotonic())

    def _end_without_process_0(self) -> NoReturn:
        """End this process. jax would end it, too, within milliseconds, so the line must be written at once."""
        text = (
            "feedline: no answer from process 0, whose connections are closed: it was killed, crashed or called "
            f"os._exit; look there first. It ran the coordination service, so process {self._process} ends, too\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        _end(0 if self._succeeded.is_set() else self._code)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._previous_hook(kind, error, trace)
        finally:
            if os.getpid() == self._pid and not _is_interactive():
                abort(error)

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(FeedError):
                self._service.replace(f"{_HEARTBEAT}/{self._process}", str(self._beats))
                if self._process == 0:
                    self._find_silent()
                status = self._service.dir(_STATUS)
                self._beats += 1
                self._report_silent(json.loads(status.get(_SILENT, "[]")))
                ends = [json.loads(end) for key, end in sorted(status.items()) if key.startswith(_FIRST_ENDS)]
                if ends and not self._succeeded.is_set():
                    self._find_early_end(ends)
                if self.failure is None and (found := missed_move()):
                    out_of_step(found)

    def _find_silent(self) -> None:
        """In process 0: publish whose heartbeats have stopped."""
        for process, beat in self._service.by_process(_HEARTBEAT).items():
            last, times = self._last_beats.get(process, ("", 0))
            self._last_beats[process] = beat, times + 1 if beat == last else 0
        silent = sorted(process for process, (_, times) in self._last_beats.items() if times > _BEATS)
        if silent and self.failure is not None:
            left = self._service.by_process(_LEFT)
            silent = [process for process in silent if process not in left]
        if silent != self._silent:
            self._service.replace(_SILENT, json.dumps(silent))

    def _report_silent(self, silent: list[int]) -> None:
        others = [process for process in silent if process != self._process]
        if new := [process for process in others if process not in self._silent]:
            self._print_silent(new, "killed, stopped (SIGSTOP), swapped out or cut off from process 0")
        if back := [process for process in self._silent if process not in others]:
            say(f"{process_names(back)} answered again")
        self._silent = others

    def _watch_process_0(self) -> None:
        before, looks = -1, 0
        while not self._over.wait(self._every_s):
            before, looks, last = self._beats, (looks + 1 if self._beats == before else 0), looks
            if looks == _BEATS:
                self._print_silent([0], f"stopped (SIGSTOP), swapped out or cut off from process {self._process}")
            elif last >= _BEATS > looks:
                say("process 0 answered again")

    def _print_silent(self, silent: list[int], reasons: str) -> None:
        say(
            f"no answer from {process_names(silent)} for {_BEATS * self._every_s:.3g} s: {reasons}; look there "
            f"first. Without an answer, jax ends process {self._process} by signal 6 (SIGABRT) when heartbeats "
            "time out"
        )

    def _find_early_end(self, ends: list[tuple[int, dict[str, Any]]]) -> None:
        """Report a process that ended after fewer batches than this one: a collective would wait for it."""
        now, process = time.monotonic(), ends[0][0]
        if self._first_end_at is None:
            self._first_end_at, self.one_has_ended = now, True
        if now >= self._first_end_at + _WARN_S:
            self._first_end_at = float("inf")  # print the line only once
            say(
                f"process {process} reached the end of the program {_WARN_S:g} s ago, and process {self._process} "
                f"continues. If process {self._process} hangs, it waits for process {process} in a collective: "
                f"look in process {process} for a loop that ends early"
            )
        process, found = next(((one, more) for one, ended in ends if (more := more_than(ended))), (process, None))
        self._ahead_at = (self._ahead_at or now) if found else None
        # wait first, because a loop may take one batch more than it uses, and then end
        if found and self._ahead_at and now >= self._ahead_at + self._abort_after_s - self._every_s:
            message = (
                f"it reached its end after {found[0]} batches of a feed, but process {self._process} has taken "
                f"{found[1]}, and each step needs all processes: look there for a loop that ends early, "
                "such as by `break` or `sys.exit` (call feedline.cluster.abort before it)"
            )
            _report(self._service, process, {"message": message})

    def _at_exit(self) -> None:
        if not self.watches:
            return
        error = getattr(sys, "last_value", None)  # Python sets it before it calls the hook
        if error is not None and sys.excepthook != self._uncaught and not _is_interactive():
            abort(error)  # another hook, such as rich's, may have replaced the monitor's
        if self.failed:
            self.leave(1)
        self._succeeded.set()
        try:
            with contextlib.suppress(FeedError):
                self._service.set(f"{_ENDED}/{self._process}", "")
                for group, ended in {"": {}, **counts_by_group()}.items():
                    key = f"{_FIRST_ENDS}/{group}"
                    if self._service.set(key, json.dumps([self._process, ended])):
                        continue
                    first, ended = json.loads(self._service.try_get(key) or "[0, {}]")
                    if found := ends_differ(first, ended, self._process):
                        out_of_step(found)
                if self._service.increment("feedline/number_ended") == self._service.processes:
                    self._service.set(_ABORT, _SUCCESS)
            self._thread.join(_SUCCESS_S)
            if self._thread.is_alive():
                self._report_long_wait()
                self._thread.join()
            for thread in self._beating:
                thread.join(_JOIN_S)
        except KeyboardInterrupt:
            self._end(130, 0.0)  # 128 + SIGINT, as shells count

    def _report_long_wait(self) -> None:
        """Report the processes that have not reached their end: this process no longer waits for them."""
        with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
            ended = self._service.by_process(_ENDED)
            others = [process for process in range(self._service.processes) if process not in ended]
            if others:  # if there are none, the last one has just ended
                more = f", nor had {process_names(others[1:])}" if others[1:] else ""
                message = (
                    f"it had not reached its end {_SUCCESS_S:g} s after process {self._process} did{more}: look "
                    "there for a step that hangs, or for work that one process does alone, such as a last "
                    "evaluation; do such work before the last step"
                )
                _report(self._service, others[0], {"message": message})

    def _end(self, code: int, timeout_s: float) -> NoReturn:
        """End this process; process 0, which stores the keys, first waits up to `timeout_s` for the others."""
        with contextlib.suppress(FeedError, TimeoutError):
            if self._process:
                _finish()  # first: after the next line, process 0 may end, and collectives here print errors
                self._service.set(f"{_LEFT}/{self._process}", "")
                os._exit(code)
            deadline = time.monotonic() + timeout_s
            for process in range(1, self._service.processes):
                self._service.get(f"{_LEFT}/{process}", deadline - time.monotonic())
        _end(code)


def _is_interactive() -> bool:
    """Whether this process continues after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _end(code: int) -> NoReturn:
    """End this process by `os._exit`, which skips everything that a normal exit may wait for."""
    _finish()
    os._exit(code)


def _finish() -> None:
    """Flush output and kill child processes, which `os._exit` does not do."""
    _call_briefly(_flush)
    for child in multiprocessing.active_children():  # workers would outlive their parent
        child.kill()


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(*_UNWRITABLE):
            stream.flush()


def say(*lines: str) -> None:
    """Write lines to stderr, if that is possible at all."""
    text = "".join(f"feedline: {line}\n" for line in lines)

    def write() -> None:
        with contextlib.suppress(*_UNWRITABLE):
            sys.stderr.write(text)  # in one call, because several processes share the terminal
            sys.stderr.flush()

    _call_briefly(write)


def _call_briefly(function: Callable[[], None]) -> None:
    """Call a function in a thread, and wait only briefly, since the main thread may hold a lock that it needs."""
    thread = threading.Thread(target=function, name="feedline-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on, an interpreter that exits starts no threads
        function()
    else:
        thread.join(_OUTPUT_S)
