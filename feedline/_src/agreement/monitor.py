"""Ends all processes, with the error message of the process that failed, whatever they are waiting for."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Protocol

from feedline._src.agreement import failure_lines
from feedline._src.agreement.coordination import Coordination, coordination, is_unreachable, process_names
from feedline._src.agreement.in_step import counts, ends_differ, missed_move, more_than
from feedline._src.errors import FeedError, ProcessError, as_arguments

EXTRA_HEARTBEAT_S = 5.0
"""Added to `abort_after_s` for jax's heartbeat timeout, so that a process that is merely slow is not ended."""
_KEY = "feedline/abort"
"""Its value is the first failure, as [process, arguments of the error]; or `_OVER` once all have succeeded.

The process is None if all of them have failed.
"""
_ENDED = "feedline/ended"
"""Below it, a key of each process that has reached its end."""
_FIRST_END = "feedline/first_end"
"""Its value is the first process that reached its end, and its counts of each feed."""
_OVER = ""
_FOREVER_S = 1e9
_STDERR = 2
_LOOK_S = 0.5  # how often a process looks whether another one has left its loop early
_WARN_S = 30.0  # how long a process may go on after another one has ended before a line names that one
_EARLY_S = 1.0  # how long a process may go on after another one has ended that took at least two batches less
_OUTPUT_S = 1.0  # how long the end of this process waits for its last output
_PROCESS_0_S = 2.0  # how long process 0, which stores the keys, waits for the others to end
_SUCCESS_S = 300.0  # how long a process that succeeded waits for the others: like jax's own shutdown barrier


class _SupportsClose(Protocol):
    def close(self) -> None: ...


_monitor: Monitor | None = None
_closed_on_abort: set[weakref.ref[_SupportsClose]] = set()
"""Closed once another process failed, which wakes their waits. Any thread adds; the copy of a set is atomic."""


def abort(reason: str | BaseException) -> None:
    """Report to the other processes that this one has failed: they end with this message.

    An uncaught exception is reported without this call. Call it before `sys.exit(1)`, which jax and feedline
    cannot distinguish from success: the process would wait for the others at its end. Only the first failure is
    reported. Without a monitor (see `initialize`) the others notice it only when they wait inside feedline. In a
    process that did not join others, the call does nothing.

    Args:
      reason: a sentence, or the exception.
    """
    if _monitor is not None:
        _monitor.failed = True
    service = coordination()
    if service is not None:
        _report(service, as_arguments(reason) if isinstance(reason, BaseException) else {"message": reason})


def _report(service: Coordination, arguments: dict[str, Any]) -> None:
    """Report a failure to all processes, unless there was one before.

    Args:
      arguments: of the error. It may name another process than this one as the one that failed.
    """
    process = arguments.pop("process", service.process)
    arguments["message"] = failure_lines.failure_message(process, arguments["message"])
    with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
        service.set(_KEY, json.dumps([process, arguments]))


def out_of_step(found: str) -> ProcessError:
    """The error of processes that take different batches of a feed, which ends all of them: each may be the one.

    Args:
      found: how they differ.
    """
    service = coordination()
    if service is not None:
        _report_all(service, found)
    return ProcessError(found, stage="agree")


def _report_all(service: Coordination, message: str) -> None:
    """Report a failure that no process has caused alone."""
    with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
        service.set(_KEY, json.dumps([None, {"message": message, "stage": "agree"}]))


def failure() -> ProcessError | None:
    """The failure that the monitor has received, if any."""
    return _monitor.failure if _monitor is not None else None


def poll_failure() -> ProcessError | None:
    """The failure of another process, if any; without a monitor, asks the coordination service."""
    if _monitor is not None and (_monitor.watches or _monitor.failure is not None):
        return _monitor.failure
    with contextlib.suppress(FeedError):
        service = coordination()
        found = service.try_get(_KEY) if service is not None else None
        return _error_of(*json.loads(found)) if found else None
    return None


def ended_processes(service: Coordination) -> set[int]:
    """The processes with a monitor that have reached their end, if this process has a monitor."""
    if _monitor is None or not _monitor.one_has_ended:
        return set()
    return set(service.by_process(_ENDED))


def _error_of(process: int | None, arguments: Mapping[str, Any]) -> ProcessError:
    """The error that waits inside feedline raise once `process` has failed; None: all have."""
    return ProcessError(**{"stage": "abort", "process": process, **arguments})


def close_on_abort(waiting: _SupportsClose) -> None:
    """Close `waiting` when another process fails; its owner then raises `failure()`."""
    _closed_on_abort.add(weakref.ref(waiting, _closed_on_abort.discard))
    if failure() is not None:
        waiting.close()


def watch(abort_after_s: float) -> None:
    """Start this process's monitor, if it joined others and has none yet."""
    global _monitor
    service = coordination()
    if service is not None and service.processes > 1 and (_monitor is None or not _monitor.watches):
        _monitor = Monitor(service, abort_after_s)
        _monitor.start()


def leave(code: int) -> NoReturn:
    """End this process after a failure, without a normal exit's waits."""
    abort(f"it ended with exit code {code}")
    if _monitor is not None and _monitor.watches:
        _monitor.leave(code)
    _end(code)


class Monitor:
    """Waits for the failure of any process, and then ends this one.

    Its thread blocks on one key. When a process fails, the thread prints the failure, closes what waits inside
    feedline (the caller gets the failure as an exception), and ends this process `abort_after_s` later, because a
    thread inside a collective cannot be interrupted. At exit the process waits until all have succeeded or one has
    failed; this replaces jax's shutdown barrier, which does not report failures.

    `watch` makes and starts the monitor; the interpreter calls its two hooks. It ends with the process or with
    `jax.distributed.shutdown()`.
    """

    def __init__(self, service: Coordination, abort_after_s: float) -> None:
        self.failure: ProcessError | None = None
        self._service = service
        self._abort_after_s = abort_after_s
        self._succeeded = threading.Event()  # this process has reached its end without a failure
        self.failed = False  # this process has failed, and ends because of that
        self._code = 1  # the exit code after a failure
        self._told = threading.Event()  # this process has written which one failed
        self.one_has_ended = False
        self._pid = os.getpid()  # a forked child inherits the hooks but not the thread
        self._previous_hook = sys.excepthook
        self._thread = threading.Thread(target=self._run, name="feedline-abort", daemon=True)
        self._ends = threading.Thread(target=self._find_early_end, name="feedline-ends", daemon=True)
        # jax sends a heartbeat twice in its timeout, so that it may end this process after half of the timeout.
        self._silent_after_s = (abort_after_s + EXTRA_HEARTBEAT_S) / 3
        from feedline._src.agreement.answers import Answers

        self._answers = Answers(service, self._silent_after_s, _print, self._find_missed_move)

    @property
    def watches(self) -> bool:
        """Whether the thread still runs in this process."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread and set the hooks."""
        self._thread.start()
        self._ends.start()
        self._answers.start()
        sys.excepthook = self._uncaught
        # Registered now, it runs after the hooks that the user registers later, and before jax's own.
        atexit.register(self._at_exit)

    def leave(self, code: int) -> NoReturn:
        """End this process, which has failed, perhaps because another one has."""
        self._code = code
        if self.failure is not None:  # the exception that it raised here may have come before the line about it
            self._told.wait(_OUTPUT_S)
        self._end(code, self._abort_after_s + _PROCESS_0_S)

    def _run(self) -> None:
        try:
            value = self._service.get(_KEY, _FOREVER_S)
        except FeedError as error:
            if is_unreachable(error):
                self._end_without_process_0()
            return  # jax has shut down
        finally:
            self._answers.stop()
        if value == _OVER:
            return
        deadline = time.monotonic() + self._abort_after_s + _PROCESS_0_S
        process, arguments = json.loads(value)
        with contextlib.suppress(FeedError):  # acknowledges the failure
            self._service.set(f"{_KEY}/heard/{self._service.process}", "")
        self.failure = _error_of(process, arguments)
        for reference in _closed_on_abort.copy():
            waiting = reference()
            if waiting is not None:  # it may close an iterator of the user's, which may hang or raise
                _call_briefly(waiting.close)
            del waiting
        own = process in (None, self._service.process)
        if not own:
            _print(str(FeedError(**arguments)), f"process {self._service.process} ends, too")
        elif not self.failed:  # another process has found that this one left its loop early
            self.failed = True
            _print(str(FeedError(**arguments)))
        self._told.set()
        told_s = min(self._silent_after_s, self._abort_after_s)
        if not self._succeeded.wait(told_s):
            if silent := self._silent_processes():
                _print(f"no answer from {process_names(silent)}: killed, lost or stuck; look there first")
            self._succeeded.wait(self._abort_after_s - told_s)
        self._end(0 if self._succeeded.is_set() and not self.failed else self._code, deadline - time.monotonic())

    def _end_without_process_0(self) -> NoReturn:
        """End this process. jax does it too, within milliseconds, so that the line must be written at once."""
        text = (
            "no answer from process 0, whose connections are closed: it was killed, crashed or left by os._exit; "
            f"look there first. It held the coordination service, so process {self._service.process} ends, too"
        )
        with contextlib.suppress(OSError):
            os.write(_STDERR, failure_lines.as_line(text).encode())
        _end(0 if self._succeeded.is_set() else self._code)

    def _find_early_end(self) -> None:
        """Report a process that has ended although this one takes more batches: its next collective would hang."""
        try:
            process, ended = json.loads(self._service.get(_FIRST_END, _FOREVER_S))
        except FeedError:  # jax has shut down
            return
        self.one_has_ended = True
        began, warned = time.monotonic(), False
        while not self._succeeded.wait(_LOOK_S) and self.watches and self.failure is None:
            if not warned and time.monotonic() > began + _WARN_S:
                warned = True
                _print(
                    f"process {process} reached the end of the program {_WARN_S:g} s ago, and process "
                    f"{self._service.process} goes on. If it hangs, it waits for process {process} in a "
                    "collective: look there for a loop that ends early"
                )
            if not (found := more_than(ended)):
                continue
            # one batch more may have been taken only to look whether there is one
            if self._succeeded.wait(_EARLY_S if found[1] > found[0] + 1 else max(_EARLY_S, self._abort_after_s)):
                continue
            message = (
                f"it reached its end after {found[0]} batches of a feed of which process {self._service.process} "
                f"has taken {found[1]}, and each step needs all processes: look there for a loop that ends early, "
                "such as by `break` or `sys.exit` (call feedline.cluster.abort before it)"
            )
            _report(self._service, {"message": message, "process": process})

    def _find_missed_move(self) -> None:
        if self.failure is None and (found := missed_move()):
            _report_all(self._service, found)

    def _compare_ends(self) -> None:
        """Compare the feeds of this process with those of the one that reached its end first."""
        process, ended = json.loads(self._service.try_get(_FIRST_END) or "[0, {}]")
        if found := ends_differ(process, ended, self._service.process):
            _report_all(self._service, found)

    def _silent_processes(self) -> list[int]:
        """The processes whose monitor has not acknowledged the failure."""
        with contextlib.suppress(FeedError):
            heard = self._service.by_process(f"{_KEY}/heard")
            return [process for process in range(self._service.processes) if process not in heard]
        return []

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The `sys.excepthook`: reports the exception to the other processes."""
        try:
            self._previous_hook(kind, error, trace)
        finally:
            at_prompt = hasattr(sys, "ps1") or sys.flags.interactive  # there the process goes on
            if os.getpid() == self._pid and not at_prompt:
                abort(error)

    def _at_exit(self) -> None:
        if not self.watches:
            return
        if self.failed:
            self.leave(1)
        self._succeeded.set()
        try:
            with contextlib.suppress(FeedError):
                self._service.set(f"{_ENDED}/{self._service.process}", "")
                if not self._service.set(_FIRST_END, json.dumps([self._service.process, counts()])):
                    self._compare_ends()
                if self._service.increment("feedline/number_ended") == self._service.processes:
                    self._service.set(_KEY, _OVER)
            self._thread.join(_SUCCESS_S)
            if self._thread.is_alive():
                self._report_long_wait()
                self._thread.join()
        except KeyboardInterrupt:
            self._end(130, 0.0)  # 128 + SIGINT, as shells count

    def _report_long_wait(self) -> None:
        """Report the processes that have not reached their end: this one waits for them no longer."""
        with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
            ended = self._service.by_process(_ENDED)
            others = [each for each in range(self._service.processes) if each not in ended]
            if not others:  # the last one ends now
                return
            more = f", nor had {process_names(others[1:])}" if others[1:] else ""
            message = (
                f"it had not reached its end {_SUCCESS_S:g} s after process {self._service.process} did{more}: "
                "look there for a step that hangs, or for work that one process does alone, such as a last "
                "evaluation; do such work before the last step of all"
            )
            _report(self._service, {"message": message, "process": others[0]})

    def _end(self, code: int, timeout_s: float) -> NoReturn:
        """End this process; process 0, which stores the keys, first waits up to `timeout_s` for the others."""
        with contextlib.suppress(FeedError, TimeoutError):
            # it may end before its own monitor has heard of the failure, and has answered
            self._service.set(f"{_KEY}/heard/{self._service.process}", "")
            if self._service.process:
                _finish()  # now: once process 0 has ended, collectives of this process fail and say so
                self._service.set(f"{_KEY}/left/{self._service.process}", "")
                os._exit(code)
            deadline = time.monotonic() + timeout_s
            for process in range(1, self._service.processes):
                self._service.get(f"{_KEY}/left/{process}", deadline - time.monotonic())
        _end(code)


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
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _print(*lines: str) -> None:
    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(map(failure_lines.as_line, lines)))
            sys.stderr.flush()

    _call_briefly(write)


def _call_briefly(function: Callable[[], None]) -> None:
    """Call a function, and wait for it only briefly: the main thread may hold a lock that the function needs."""
    thread = threading.Thread(target=function, name="feedline-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on, an interpreter that exits starts no threads
        function()
    else:
        thread.join(_OUTPUT_S)
