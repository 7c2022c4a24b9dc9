"""SIGTERM and Ctrl-C end a training loop between two steps, at a step on which all processes agree."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from feedline._src.agreement.coordination import Coordination, coordination, counted, process_names
from feedline._src.errors import FeedError
from feedline._src.options import checked_integer

if TYPE_CHECKING:
    from types import FrameType

_log = logging.getLogger("feedline")
_FOREVER_S = 1e9
_WARN_S = 30.0
_SLICE_S = 1.0  # length of one wait for other processes: `close` can end the thread between two waits
_JOIN_S = 10.0  # how long `close` waits for calls of the thread that are in flight
_CLOSED = ""
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

_stop: Stop | None = None


def should_stop(step: int) -> bool:
    """Return whether to save and leave the loop, because a process of the run got SIGTERM or SIGINT (Ctrl-C).

    Every process must call it once for each step, with the step's number. After a signal to one process, it
    returns True in all processes from the same step on. A call takes about a microsecond, and no message is sent
    before a signal comes.

    The first call must be in the main thread; it installs handlers for both signals. The first signal makes this
    function return True. A second signal goes to the handler that Python had before; by default, it ends the
    process at once. Until the first call, a run of several processes ignores SIGTERM, because jax catches it.

    Args:
      step: the number of the step, counted over all resumes. It must be larger than in the previous call. Pass
        an int: a `jax.Array` would be fetched, which waits for the devices at each step.

    Raises:
      TypeError: the step is no integer.
      RuntimeError: the first call is not in the main thread; only that thread receives signals.

    Example:
      >>> for step in range(3):  # doctest: +SKIP
      ...     if should_stop(step):  # after the train step
      ...         break  # save here, then sys.exit(143)
    """
    global _stop
    if _stop is None:
        _stop = Stop()
        atexit.register(_stop.close)
    return _stop.reached(step)


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Context manager: installs the signal handlers of `should_stop`, and restores the earlier ones on exit."""
    global _stop
    before, _stop = _stop, Stop()
    try:
        yield _stop
    finally:
        _stop.close()
        _stop = before


def restore_sigterm() -> None:
    """Restore SIGTERM's handler from before `jax.distributed.initialize`, which catches and ignores the signal."""
    if coordination() is not None:
        # `getsignal` returns the earlier handler, because Python does not know jax's
        _restore({signal.SIGTERM: signal.getsignal(signal.SIGTERM)})


class Stop:
    """Catches the first signal, and agrees with the other processes on a step at which to stop.

    In each process, a thread waits until the process's key in the coordination service is set. The process that
    gets a signal sets all keys. Each thread then blocks `reached`, publishes the step of the latest call, and
    waits for the steps of the other processes. All stop at the highest step plus one, which none has passed.
    (docs/processes.md says why jax's `reached_preemption_sync_point` is not used.)

    The main thread creates a `Stop`, and calls `reached` and `close`. `signal` is the signal for which `reached`
    returned True. After `close`, it may also be a signal that arrived after the last call of `reached`, in this
    process or in a process that called `close` earlier.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signals are received by the main thread alone, but should_stop was first called in "
                f"{threading.current_thread().name!r}; call it once in the main thread before the loop"
            )
        self.signal: int | None = None
        self._pid = os.getpid()  # a forked child inherits the handlers
        self._received: int | None = None  # set by the handler, which must not take a lock
        self._announced = False
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held by the thread while the processes agree; guards the next three
        self._step = -1  # of the last call of `reached`
        self._stop_step: int | None = None  # at which all stop
        self._stop_signal: int | None = None  # for which they stop
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _NAMES}
        self._usual = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        service = coordination()
        self._service = service if service is not None and service.processes > 1 else None
        self._thread: threading.Thread | None = None
        if self._service is not None:
            self._key = counted("stop", range(self._service.processes))
            self._thread = threading.Thread(
                target=self._agree, args=(self._service,), name="feedline-stop", daemon=True
            )
            self._thread.start()
        for number in self._usual:
            signal.signal(number, self._handle)

    def reached(self, step: int) -> bool:
        step = checked_integer("step", step, at_least=0)
        if self._service is None:
            self.signal = self._received
        else:
            self._announce(self._service)
            with self._lock:
                self._step = step
                if self._stop_step is not None and step >= self._stop_step:
                    self.signal = self._stop_signal
        return self.signal is not None

    def close(self) -> None:
        """Restore the handlers and end the thread, which first publishes the last step for the others.

        A signal that came after the last step is not lost: `signal` is set, and the other processes are notified.
        """
        if os.getpid() != self._pid:
            return
        _restore(self._usual)
        announced = None
        self._closed.set()
        if self._service is not None and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(FeedError):  # process 0 is gone, so the thread does not wait any longer
                self._announce(self._service)
                self._service.set(f"{self._key}/notice/{self._service.process}", _CLOSED)
                announced = self._service.try_get(f"{self._key}/signal")
            self._thread.join(_JOIN_S)
        self.signal = self.signal or self._stop_signal or int(announced or 0) or self._received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        _restore(self._usual)
        if os.getpid() != self._pid:  # a forked child: act as if the parent had not installed this handler
            os.kill(os.getpid(), number)
            return
        self._received = number
        if self._service is None or self._service.process == 0:
            name = _NAMES[signal.Signals(number)]
            line = f"feedline: the loop ends after this step; a second {name} ends the process at once\n"
            with contextlib.suppress(OSError):  # the same Ctrl-C may have ended the reader, such as `tee`
                os.write(2, line.encode())  # print is not safe in signal handlers

    def _announce(self, service: Coordination) -> None:
        """If this process got a signal, set the keys of all processes, unless another process has done so."""
        if self._received is None or self._announced:
            return
        self._announced = True
        if service.set(f"{self._key}/signal", str(self._received)):
            for process in range(service.processes):
                service.set(f"{self._key}/notice/{process}", str(self._received))

    def _agree(self, service: Coordination) -> None:
        with contextlib.suppress(FeedError):  # process 0 is gone, or jax has shut down
            notice = service.get(f"{self._key}/notice/{service.process}", _FOREVER_S)
            with self._lock:
                service.set(f"{self._key}/step/{service.process}", str(self._step))
                if service.increment(f"{self._key}/arrived") == service.processes:
                    steps = service.by_process(f"{self._key}/step").values()
                    service.set(f"{self._key}/stop_step", str(max(map(int, steps)) + 1))
                if notice != _CLOSED and (stop_step := self._await_stop_step(service)) is not None:
                    self._stop_step, self._stop_signal = stop_step, int(notice)

    def _await_stop_step(self, service: Coordination) -> int | None:
        """The step at which all stop; None once this `Stop` is closed. A warning names slow processes."""
        warn_at = time.monotonic() + _WARN_S
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                return int(service.get(f"{self._key}/stop_step", min(_SLICE_S, _WARN_S)))
            if time.monotonic() >= warn_at:
                warn_at = math.inf
                arrived = service.by_process(f"{self._key}/step")
                absent = [process for process in range(service.processes) if process not in arrived]
                text = "a signal ends all processes; still waiting for %s to call should_stop"
                _log.warning(text, process_names(absent))
        return None


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that was not installed from Python
