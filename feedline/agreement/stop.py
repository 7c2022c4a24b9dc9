"""SIGTERM and Ctrl-C end a training loop between two steps, at a step on which all processes agree."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from feedline.agreement.coordination import Coordination, coordination
from feedline.agreement.differences import named
from feedline.errors import FeedError

if TYPE_CHECKING:
    from types import FrameType

_log = logging.getLogger("feedline")
_STDERR = 2
_FOR_EVER_S = 1e9
_WARN_S = 30.0
_JOIN_S = 1.0
_CLOSED = ""
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

_stop: Stop | None = None
_made = itertools.count()
"""Numbers the stops of this process: all processes make theirs in the same order."""


def should_stop(step: int) -> bool:
    """Whether to save and leave the loop, because a process of the run got SIGTERM or SIGINT (Ctrl-C).

    Every process calls it once for each step, with the same number, which grows from call to call. After a
    signal to one of them it returns True at a step that is the same on all of them, and at each later one. A
    call takes about a microsecond, and no message is sent before a signal comes.

    The first call, in the main thread, takes over both signals. The first signal is noted; the second one acts
    as if this function was not used, and ends the process at once. Before the first call, jax notes SIGTERM where
    several processes run, and nothing comes of it.

    Args:
      step: of the whole run, so that a resumed run goes on counting.

    Raises:
      RuntimeError: the first call is not made in the main thread, which alone receives signals.

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
    """While this is entered, `should_stop` works; at the end the signals act as before.

    Example:
      >>> with stopping() as stop:
      ...     print(should_stop(1), stop.signal)
      False None
    """
    global _stop
    before, _stop = _stop, Stop()
    try:
        yield _stop
    finally:
        _stop.close()
        _stop = before


def take_sigterm_back() -> None:
    """Have SIGTERM act as before `jax.distributed.initialize`, which notes it and lets the program run on."""
    if coordination() is not None:
        _restore({signal.SIGTERM: signal.getsignal(signal.SIGTERM)})  # Python has not seen that jax took it


class Stop:
    """Notes the first signal, and agrees with the other processes on a step.

    The process that gets a signal sets a key for each process, for which a thread waits there. The thread stops
    `reached` for a moment, publishes the last step that it was asked about, and waits for the others to do so;
    all stop at the highest of these steps, plus one. So no process has passed it.

    jax's `reached_preemption_sync_point` works in the same way and is not used: it knows nothing of Ctrl-C,
    nor which signal it was, swallows the second signal, and never says True to a loop that asks at every
    tenth step.

    Who calls: the main thread makes it and asks `reached`; `close`, in the main thread, ends the thread and
    gives the signals back.

    Attributes:
      signal: the one for which `reached` said True; None if it has not.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signals are received by the main thread alone, and should_stop was first called in "
                f"{threading.current_thread().name!r}; call it there once before the loop"
            )
        self.signal: int | None = None
        self._pid = os.getpid()  # a forked child inherits the handlers
        self._noted: int | None = None  # set by the handler, which may take no lock
        self._announced = False
        self._lock = threading.Lock()  # held by the thread while the processes agree
        self._step = -1  # of the last call; guarded by the lock
        self._at: int | None = None  # the step at which all stop; guarded by the lock
        self._agreed: int | None = None  # the signal for which they do; guarded by the lock
        service = coordination()
        self._service = service if service is not None and service.processes > 1 else None
        self._key = f"feedline/stop/{next(_made)}"
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _NAMES}
        self._usual = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        self._thread: threading.Thread | None = None
        if self._service is not None:
            self._thread = threading.Thread(
                target=self._agree, args=(self._service,), name="feedline-stop", daemon=True
            )
            self._thread.start()
        for number in self._usual:
            signal.signal(number, self._note)

    def reached(self, step: int) -> bool:
        """See `should_stop`."""
        if self._service is None:
            self.signal = self._noted
        else:
            if self._noted is not None and not self._announced:
                self._announced = True
                self._announce(self._service, self._noted)
            with self._lock:
                self._step = step
                if self._at is not None and step >= self._at:
                    self.signal = self._agreed
        return self.signal is not None

    def close(self) -> None:
        """Give the signals back, and end the thread, which publishes the last step: the others may still agree."""
        if os.getpid() != self._pid:
            return
        _restore(self._usual)
        if self._service is not None and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(FeedError):  # process 0 is gone, and with it the wait
                self._service.set(self._notice(self._service.process), _CLOSED)
            self._thread.join(_JOIN_S)

    def _note(self, number: int, frame: FrameType | None) -> None:
        _restore(self._usual)
        if os.getpid() != self._pid:  # a child: as if the parent had not taken the signal over
            os.kill(os.getpid(), number)
            return
        self._noted = number
        if self._service is None or self._service.process == 0:
            name = _NAMES[signal.Signals(number)]
            said = f"feedline: ends after this step; {name} again ends it at once\n"
            with contextlib.suppress(OSError):  # what reads it, `tee` say, may have ended by the same Ctrl-C
                os.write(_STDERR, said.encode())  # print is not made for signal handlers

    def _notice(self, process: int) -> str:
        return f"{self._key}/notice/{process}"

    def _announce(self, service: Coordination, number: int) -> None:
        """Tell all processes, unless another one does."""
        if service.set(f"{self._key}/signal", str(number)):
            for process in range(service.processes):
                service.set(self._notice(process), str(number))

    def _agree(self, service: Coordination) -> None:
        with contextlib.suppress(FeedError):  # process 0 is gone, or jax has shut down
            noticed = service.get(self._notice(service.process), _FOR_EVER_S)
            with self._lock:
                service.set(f"{self._key}/said/{service.process}", str(self._step))
                if service.increment(f"{self._key}/count") == service.processes:
                    said = service.dir(f"{self._key}/said")
                    service.set(f"{self._key}/at", str(max(map(int, said.values())) + 1))
                if noticed != _CLOSED:
                    self._at = int(self._wait(service))
                    self._agreed = int(noticed)

    def _wait(self, service: Coordination) -> str:
        """For the step, with a warning if a process does not say where it is."""
        try:
            return service.get(f"{self._key}/at", _WARN_S)
        except TimeoutError:
            said = {int(key.rpartition("/")[2]) for key in service.dir(f"{self._key}/said")}
            absent = named([process for process in range(service.processes) if process not in said])
            _log.warning("a signal is to end all processes, but %s did not call should_stop yet", absent)
            return service.get(f"{self._key}/at", _FOR_EVER_S)


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python does not know
