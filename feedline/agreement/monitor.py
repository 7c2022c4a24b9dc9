"""The failure of one process ends the others, with its message, whatever they wait in."""

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

from feedline.agreement.coordination import Coordination, coordination
from feedline.errors import FeedError, ProcessError, as_arguments

_KEY = "feedline/abort"
"""Its value: who failed and why; or `_OVER`, once all have ended well. The first one stays."""
_OVER = ""
_FOR_EVER_S = 1e9
_LAST_WORDS_S = 1.0
_LEAVING_S = 2.0
_END_TOGETHER_S = 300.0
"""How long an end waits for that of the others: as long as jax's own shutdown barrier."""


class _Closable(Protocol):
    def close(self) -> None: ...


_monitor: Monitor | None = None
_runs: set[weakref.ref[_Closable]] = set()
"""What is woken by being closed once another process failed. Any thread adds, and a plain set's copy is atomic."""


def abort(reason: str | BaseException) -> None:
    """Tell the other processes that this one has failed: they end with this message.

    An uncaught exception does so by itself. Call it before `sys.exit(1)`, which nobody can see: to jax and to
    feedline that is an end like any other, for which the others are waited for.

    Without a monitor (see `initialize`) only those hear it that wait for others in feedline. Where nobody joined
    other processes it does nothing. The first failure is the one that is told.

    Args:
      reason: in a sentence, or the exception.
    """
    if _monitor is not None:
        _monitor.failed = True
    service = coordination()
    if service is not None:
        told = as_arguments(reason) if isinstance(reason, BaseException) else {"message": reason}
        process = told.get("process", service.process)  # what failed may be another one, of which this one heard
        told["message"] = f"process {process} failed: {' '.join(told['message'].split())}"
        with contextlib.suppress(FeedError):  # process 0 is gone, and with it all others
            service.set(_KEY, json.dumps([process, told]))


def failure() -> ProcessError | None:
    """The failure of which the monitor knows."""
    return _monitor.failure if _monitor is not None else None


def failure_meanwhile() -> ProcessError | None:
    """For those who wait for others, and look now and then: without a monitor, process 0 is asked."""
    if _monitor is not None and (_monitor.watches or _monitor.failure is not None):
        return _monitor.failure
    with contextlib.suppress(FeedError):
        service = coordination()
        found = service.try_get(_KEY) if service is not None else None
        return _error_of(*json.loads(found)) if found else None
    return None


def _error_of(process: int, told: Mapping[str, Any]) -> ProcessError:
    """What waits in feedline raises once `process` has failed."""
    return ProcessError(**{"stage": "abort", "process": process, **told})


def close_on_abort(run: _Closable) -> None:
    """Have `run` closed when another process fails: it then raises `failure()` in place of "closed"."""
    _runs.add(weakref.ref(run, _runs.discard))
    if failure() is not None:
        run.close()


def watch(abort_after_s: float) -> None:
    """Start this process's monitor, if it joined others and has none yet."""
    global _monitor
    service = coordination()
    if service is not None and service.processes > 1 and (_monitor is None or not _monitor.watches):
        _monitor = Monitor(service, abort_after_s)
        _monitor.start()


def leave(code: int) -> NoReturn:
    """End this process after a failure, without what a normal exit would wait for."""
    abort(f"it ended with exit code {code}")
    if _monitor is not None and _monitor.watches:
        _monitor.leave(code)
    _end(code)


class Monitor:
    """Waits for the failure of any process, and sees to it that this one ends.

    Its thread blocks on one key. When a process fails, it says so, closes what waits in feedline (whose
    caller gets the failure as an exception), and ends this process `abort_after_s` later: a thread inside a
    collective cannot be interrupted. At exit it waits until all have ended or one has failed, in place of
    jax's shutdown barrier, which would tell nobody anything.

    Who calls: `watch` makes and starts it; the interpreter calls its two hooks; it ends with the process or
    with `jax.distributed.shutdown()`.
    """

    def __init__(self, service: Coordination, abort_after_s: float) -> None:
        self.failure: ProcessError | None = None
        self._service = service
        self._abort_after_s = abort_after_s
        self._ended = threading.Event()  # this process has come to its end, and well
        self.failed = False  # this process has, and ends for it
        self._code = 1  # with which it ends then
        self._pid = os.getpid()  # a fork inherits the hooks and not the thread
        self._show = sys.excepthook
        self._thread = threading.Thread(target=self._run, name="feedline-abort", daemon=True)

    @property
    def watches(self) -> bool:
        """Whether it still waits for a failure, or deals with one."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread and set the hooks."""
        self._thread.start()
        sys.excepthook = self._uncaught
        # Registered at the start, it runs after what the user registers, and before jax's own.
        atexit.register(self._at_exit)

    def leave(self, code: int) -> NoReturn:
        """End this process, which has failed."""
        self._code = code
        self._end(code, self._abort_after_s + _LEAVING_S)

    def _run(self) -> None:
        try:
            told = self._service.get(_KEY, _FOR_EVER_S)
        except FeedError:  # jax has shut down
            return
        if told == _OVER:
            return
        process, failed = json.loads(told)
        self._acknowledge()
        self.failure = _error_of(process, failed)
        for reference in _runs.copy():
            run = reference()
            if run is not None:
                run.close()
            del run
        if process != self._service.process:
            _say(f"{FeedError(**failed)}\nfeedline: process {self._service.process} ends, too")
        self._ended.wait(self._abort_after_s)
        silent = self._silent()
        if silent:
            _say(f"no answer from process {', '.join(map(str, silent))}: killed, lost or stuck; look there first")
        self._end(0 if self._ended.is_set() else self._code, _LEAVING_S)

    def _acknowledge(self) -> None:
        with contextlib.suppress(FeedError):
            self._service.set(f"{_KEY}/heard/{self._service.process}", "")

    def _silent(self) -> list[int]:
        """The processes whose monitor has not heard of the failure."""
        with contextlib.suppress(FeedError):
            heard = {int(key.rpartition("/")[2]) for key in self._service.dir(f"{_KEY}/heard")}
            return [process for process in range(self._service.processes) if process not in heard]
        return []

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The hook for an exception that nobody caught."""
        try:
            self._show(kind, error, trace)
        finally:
            goes_on = hasattr(sys, "ps1") or sys.flags.interactive  # at a prompt an exception ends nothing
            if os.getpid() == self._pid and not goes_on:
                abort(error)

    def _at_exit(self) -> None:
        if not self.watches:
            return
        if self.failed:
            self.leave(1)
        self._ended.set()
        try:
            with contextlib.suppress(FeedError):
                if self._service.increment("feedline/ended") == self._service.processes:
                    self._service.set(_KEY, _OVER)
            self._thread.join(_END_TOGETHER_S)
            if self._thread.is_alive():
                abort(f"process {self._service.process} ended {_END_TOGETHER_S:g} s before the others")
                self._thread.join()
        except KeyboardInterrupt:
            self._end(130, 0.0)  # 128 + SIGINT, as shells count

    def _end(self, code: int, patience_s: float) -> NoReturn:
        """Process 0, without which nobody is told anything, goes last, but waits no longer than `patience_s`."""
        with contextlib.suppress(FeedError, TimeoutError):
            if self._service.process:
                self._service.set(f"{_KEY}/left/{self._service.process}", "")
            else:
                deadline = time.monotonic() + patience_s
                for process in range(1, self._service.processes):
                    self._service.get(f"{_KEY}/left/{process}", deadline - time.monotonic())
        _end(code)


def _end(code: int) -> NoReturn:
    """Past all that a normal exit does and could wait for, but what was written is written."""
    _briefly(_flush)
    for child in multiprocessing.active_children():  # Grain's workers outlive their parent
        child.kill()
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _say(line: str) -> None:
    def say() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"feedline: {line}\n")
            sys.stderr.flush()

    _briefly(say)


def _briefly(function: Callable[[], None]) -> None:
    """Call it, but do not wait for it for long: the main thread may hold the lock that it needs."""
    thread = threading.Thread(target=function, name="feedline-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits, and from Python 3.12 on starts no more threads then
        function()
    else:
        thread.join(_LAST_WORDS_S)
