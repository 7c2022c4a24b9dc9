"""A worker process: makes batches in its order, ahead of the process that takes them over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle
import jax

from feedline._src.errors import WorkerError
from feedline._src.loader.shared_memory import remove_of_this_worker, remove_of_workers
from feedline._src.runtime.jax_settings import JaxSettings

END_S = 5.0
"""How long workers may take to end by themselves, before they are killed."""
Make = Callable[[int], Any]
_Message = tuple[Literal["ready", "item", "error"], Any]

_EXIT = (
    "something that it ran ended it: look for sys.exit, os._exit or a library that ends the process, for example "
    "in a transform"
)
_ENDS = {
    -7: "the kernel sends signal 7 (SIGBUS) where a mapped file has no memory or data any more: the file became "
    "shorter, its disk failed, or /dev/shm is full (Docker gives it 64 MB; --shm-size=8g gives more)",
    -9: "the kernel sends signal 9 (SIGKILL) when memory runs out, and `dmesg` then says so: use fewer workers, a "
    "smaller Reading.buffer or batch_size, or give the job more memory",
}
"""The meaning of exit codes of a worker, as far as it is known."""
_NO_GUARD = (
    "it ended before its first batch: a script that uses workers must build and run its feed under "
    '`if __name__ == "__main__":`, since every worker imports the script again; so that must be a file, and not '
    "standard input"
)


class WorkerEndedError(Exception):
    """A worker ended before its work.

    Attributes:
      code: its exit code.
      started: whether it had unpickled its source: if not, the next one would end as well.
    """

    def __init__(self, code: int, started: bool) -> None:
        super().__init__(f"a worker ended with exit code {code}")
        self.code, self.started = code, started

    @property
    def told(self) -> WorkerError:
        """The error that the user sees."""
        meaning = _ENDS.get(self.code, "look at what it printed")
        if self.code > 0 and not self.started:
            meaning = _NO_GUARD
        elif self.code >= 0:
            meaning = f"{_EXIT}; and at what it printed" if self.code else _EXIT
        return WorkerError(
            f"a worker process must live as long as its feed, and one ended with exit code {self.code}: {meaning}",
            stage="read",
        )


class Worker:
    """A spawned process that makes the items of some numbers. For one thread, but for `kill`.

    The processes share a pipe and no lock: one that is stopped or killed at any moment blocks nobody for ever.

    Args:
      make: number → item; it is pickled for the process. Items and its errors travel back pickled.
      numbers: of the items, in the order in which they are taken.
      ahead: how many items it may make before they are taken.
      settings: of JAX, which the process takes over.

    Raises:
      Exception: `make` cannot be pickled.
    """

    def __init__(self, make: Make, numbers: range, ahead: int, settings: JaxSettings) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        arguments = theirs, settings, _pickled(make), numbers
        self._process = spawn.Process(target=_serve, args=arguments, name="feedline-worker", daemon=True)
        try:
            _start_without_interrupts(self._process)
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._started = False
        self._ask(ahead)

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def take(self, wake: Connection) -> Any:
        """The next item, and ask for one more.

        Args:
          wake: ends the wait once it is readable.

        Returns:
          The item; None if `wake` ended the wait.

        Raises:
          WorkerEndedError: the process ended.
          Exception: what `make` raised there.
        """
        while True:
            ready = connection.wait([self._connection, wake])
            if self._connection not in ready:
                return None
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):  # a process that ends closes its pipe
                self._process.join(END_S)
                code = self._process.exitcode
                raise WorkerEndedError(0 if code is None else code, self._started) from None
            self._started = True
            kind, value = pickle.loads(message)
            if kind == "ready":
                continue
            self._ask(1)
            if kind == "error":
                error, text = value
                error.__cause__ = _TracebackOfWorkerError(text)
                raise error
            return value

    def kill(self) -> None:
        """End the process, even if it is stopped. From any thread."""
        self._process.kill()

    def _ask(self, items: int) -> None:
        with contextlib.suppress(OSError):  # it has ended: the next `take` says so
            for _ in range(items):
                self._connection.send_bytes(b"one more")


def _pickled(make: Make) -> bytes:
    try:
        made: bytes = cloudpickle.dumps(make)
    except Exception as error:
        raise TypeError(
            "worker processes get a copy of the source and of the transform, and these cannot be pickled: "
            f"{error}; make locks, open files and the like where they are used first, or read with "
            "Reading(threads=...)"
        ) from error
    return made


def end(workers: Sequence[Worker]) -> None:
    """End all of them: ask them, wait for `END_S` seconds, and kill those that live, as stopped ones do."""
    deadline = time.monotonic() + END_S
    for worker in workers:
        worker._connection.close()
    for worker in workers:
        worker._process.join(max(0.0, deadline - time.monotonic()))
        if worker._process.is_alive():
            worker.kill()
    for worker in workers:
        worker._process.join(END_S)
    remove_of_workers([worker.pid for worker in workers])


class _TracebackOfWorkerError(Exception):
    """The traceback of an error in a worker process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _start_without_interrupts(process: Any) -> None:
    """Start a process with Ctrl-C blocked until `_prepare`: else it would show a KeyboardInterrupt while it
    imports."""
    resource_tracker.ensure_running()  # not while signals are blocked: it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(to_parent: Connection, settings: JaxSettings, make: bytes, numbers: range) -> None:
    """What a worker process runs."""
    _prepare(settings)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe, or has ended
        _make_and_send(to_parent, make, numbers)
    remove_of_this_worker()


def _make_and_send(to_parent: Connection, make: bytes, numbers: range) -> None:
    try:
        made: Make = pickle.loads(make)
    except Exception as error:  # noqa: BLE001  of any type, from the source or the user's classes
        to_parent.send(_error(error))
        numbers = range(0)
    else:
        to_parent.send(("ready", None))
    for number in numbers:
        to_parent.recv_bytes()  # it is asked for
        try:
            message: _Message = "item", made(number)
        except Exception as error:  # noqa: BLE001  whatever a transform raises
            message = _error(error)
        to_parent.send(message)
        del message
    while True:  # until the parent closes the pipe: what was sent must stay until then
        to_parent.recv_bytes()


def _prepare(settings: JaxSettings) -> None:
    """Set up this worker process, before the source is unpickled.

    Args:
      settings: JAX's settings. Without them, unpickling would narrow a 64-bit `jax.Array` that a transform holds.
    """
    # Ctrl-C, a launcher and Slurm signal every process of a job, but the trainer needs batches until it has saved.
    # Not SIG_IGN, which programs that the worker starts would inherit
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, name="feedline-parent", daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # JAX must not take the memory of the trainer's accelerator
    settings.apply_everywhere()


def _end_with_parent() -> None:
    """End this worker once its parent has ended, even if the parent was killed or left by `os._exit`.

    Python itself ends workers only at a normal exit. `join` waits for a pipe that closes when the parent ends; the
    kernel's PR_SET_PDEATHSIG would fire when the *thread* that started the worker ends. The worker removes the
    shared memory that it made; the resource tracker, which ends after the last worker, removes what is left.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        try:
            remove_of_this_worker()
        finally:
            os._exit(1)


def _error(error: Exception) -> _Message:
    """The message for an error, with its traceback as text.

    An error that cannot be pickled becomes a WorkerError with its words; else it would be lost. Classes of the
    user's script cannot be pickled, either: a worker knows the script by another name.
    """
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a class does while it is pickled
        kind, words = type(error).__qualname__, "its words cannot be had"
        with contextlib.suppress(Exception):
            words = str(error)
        error = WorkerError(f"a worker process raised {kind}, which cannot be pickled: {words}", stage="read")
        error.add_note(text)
    return "error", (error, text)


def check_main_guard() -> None:
    """Refuse a feed with workers in a worker that is importing a script without a `__main__` guard.

    Raises:
      RuntimeError: this process is such a worker.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a feed with Reading(workers=...) was built while a worker process imports your script; put the "
            'code that builds and runs it under `if __name__ == "__main__":`'
        )
