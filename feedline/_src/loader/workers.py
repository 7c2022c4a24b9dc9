"""Worker processes that read batches ahead: each of n workers makes every n-th batch, and sends it over a pipe.

Worker and parent share a pipe and no lock, so a worker that is stopped or killed at any moment blocks nobody. The
leaves of a batch are sent as an open file in anonymous memory, which the kernel frees once no process has the file
open. So nothing is left after any process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import cloudpickle
import jax
import numpy as np

from feedline._src.errors import FeedError, WorkerError
from feedline._src.loader.form import HostBatch
from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.loader.restarts import Restarts
from feedline._src.options import Settings
from feedline._src.order.schedule import Cursor
from feedline._src.rows.spec import Array
from feedline._src.runtime.threads import JaxSettings, Stopwatch

END_S = 5.0
"""Grace period of workers in seconds: a worker that has not ended by then is killed."""
T = TypeVar("T")
_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM)

_EXIT = (
    "its own code ended it; look for sys.exit, os._exit or a library that ends the process, for example in a "
    "transform"
)
_SIGNALS = {
    -7: "the kernel sends signal 7 (SIGBUS) where a mapped file has no data any more: it became shorter, or its "
    "disk failed",
    -9: "the kernel sends signal 9 (SIGKILL) when memory runs out, and `dmesg` then says so: use fewer workers, a "
    "smaller Reading.buffer or batch_size, or give the job more memory",
}
_NO_GUARD = (
    "it ended before its first batch: a script that uses workers must build and run its feed under "
    '`if __name__ == "__main__":`, since every worker imports the script again; so the script must be a file, not '
    "standard input"
)


class WorkerBatches:
    """An iterator over the process-local batches after `origin`, read ahead by worker processes.

    One thread at a time may call `next` or `close`. The first `next` starts the workers.
    """

    def __init__(self, access: RandomAccess, origin: Cursor, settings: Settings, restarts: Restarts) -> None:
        self._access = access
        self._restarts = restarts
        self._after = origin
        self._settings = settings
        self._workers: list[Worker] = []
        self._next = 0  # the number of the next batch, counted since the current workers started
        self._awaited: Worker | None = None  # the worker for whose batch a thread waits
        self._stuck: WorkerError | None = None  # why a worker was killed
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)

    def __next__(self) -> HostBatch:
        """The next batch. The value of StopIteration is the number of rows left out at the end of the pass."""
        while True:
            left = self._access.schedule.batches_from(self._after)
            if not left:
                raise LocalBatches(self._access, self._after).end()
            if not self._workers:
                self._start(left)
            self._awaited = self._workers[self._next % len(self._workers)]
            try:
                batch = self._awaited.take(self._wake)
            except WorkerEndedError as ended:
                stuck, self._stuck = self._stuck, None
                if ended.lacks_guard:
                    raise ended.reported from None
                self._restarts.use(stuck or ended.reported)
                self.close()  # end the other workers, too, because new ones begin with the missing batch
                continue
            finally:
                self._awaited = None
            if batch is None:
                raise WorkerError("nobody waits for this batch any more", stage="read")
            self._next += 1
            self._after = batch.after
            return batch

    def stop_waiting(self) -> None:
        """Make `next` stop waiting for workers, now and in later calls. Any thread may call this."""
        with contextlib.suppress(OSError):
            self._waker.send_bytes(b"stop")

    def end_stuck_workers(self, limit_s: float) -> bool:
        """Kill the worker for which `next` has waited for `limit_s`. Returns whether it will be replaced."""
        worker = self._awaited
        if worker is None:
            return False
        replaced = self._restarts.left
        self._stuck = WorkerError(
            f"a worker process must deliver batches, and no batch came within Reading.stall_error_s = {limit_s:g} "
            "s, so the workers were killed; look for a read or a transform that hangs, or a process that was "
            "stopped, or raise that limit",
            stage="read",
        )
        worker.process.kill()
        return replaced

    def close(self) -> None:
        workers, self._workers = self._workers, []
        end(workers)

    def _start(self, count: int) -> None:
        workers, self._next = self._settings.workers, 0
        ahead = max(1, self._settings.buffer // workers) + 1
        for index in range(min(workers, count)):
            self._workers.append(Worker(self._access, self._after, range(index, count, workers), ahead))


class WorkerEndedError(Exception):
    """A worker ended before its feed. `began`: whether it had imported the script and opened its source."""

    def __init__(self, code: int, began: bool) -> None:
        super().__init__(f"a worker ended with exit code {code}")
        self.code = code
        self.lacks_guard = code > 0 and not began  # then another worker would end in the same way

    @property
    def reported(self) -> WorkerError:
        meaning = _SIGNALS.get(self.code, "look at what it printed")
        if self.lacks_guard:
            meaning = _NO_GUARD
        elif self.code >= 0:
            meaning = f"{_EXIT}; and look at what it printed" if self.code else _EXIT
        return WorkerError(
            f"a worker process must live as long as its feed, and one ended with exit code {self.code}: {meaning}",
            stage="read",
        )


class Worker:
    """A spawned process that reads batches, `ahead` batches in advance. Not thread-safe.

    Args:
      numbers: the numbers of the worker's batches, counted from `origin`.
    """

    def __init__(self, access: RandomAccess, origin: Cursor, numbers: range, ahead: int) -> None:
        try:
            pickled = cloudpickle.dumps((access, origin, 1, numbers.step))
        except Exception as error:
            raise TypeError(
                "worker processes get a copy of the source and of the transform, and these cannot be pickled: "
                f"{error}; create locks, open files and the like where they are first used, or read with "
                "Reading(threads=...)"
            ) from error
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=_serve, args=(theirs, access.jax_settings, pickled), name="feedline-worker", daemon=True
        )
        resource_tracker.ensure_running()  # before signals are blocked, because starting it unblocks them
        # blocked until `_prepare`, so that no signal to the whole job ends a worker that still imports
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_JOB)
        try:
            self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._numbers = iter(numbers)
        self._began = False
        self._ask(ahead)

    def take(self, wake: Connection) -> HostBatch | None:
        """Return the next batch, and ask the worker for one more. None if `wake` is readable first."""
        while True:
            if not self._sends(wake):
                return None
            reply = pickle.loads(self._received(self.connection.recv_bytes))
            if isinstance(reply, HostBatch):
                if not self._sends(wake):  # the worker may have been stopped before it sent the memory
                    return None
                forms: Any = reply.leaves
                leaves = _leaves_in(self._received(self._receive_memory), forms)
                self._ask(1)
                return reply._replace(leaves=leaves)
            if reply is not None:
                error, text = reply
                error.add_note(f"feedline: in a worker process:\n{text}")
                raise error
            self._began = True

    def _sends(self, wake: Connection) -> bool:
        """Wait until the worker sends something or ends. Returns False if only `wake` is readable."""
        return self.connection in connection.wait([self.connection, wake])

    def _receive_memory(self) -> int:
        try:
            with _as_socket(self.connection) as sender:
                return reduction.recvfds(sender, 1)[0]
        except RuntimeError as error:  # a descriptor was sent, but this process may open no more files
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error

    def _received(self, receive: Callable[[], T]) -> T:
        try:
            return receive()
        except (EOFError, OSError) as error:  # a process that ends closes its pipe
            _check_may_open(error)
            self.process.join(END_S)
            raise WorkerEndedError(self.process.exitcode or 0, self._began) from None

    def _ask(self, count: int) -> None:
        with contextlib.suppress(OSError):  # the worker has ended; the next `take` raises an error
            for number in itertools.islice(self._numbers, count):
                self.connection.send(number)


def end(workers: Sequence[Worker]) -> None:
    """Close the pipes of all workers, wait up to `END_S` seconds, and kill any that is still alive."""
    deadline = time.monotonic() + END_S
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
    for worker in workers:
        worker.process.join(END_S)


@contextlib.contextmanager
def _as_socket(connection: Connection) -> Iterator[socket.socket]:
    """The socket of a connection, set to blocking, since `socket.setdefaulttimeout` may make it non-blocking."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.setblocking(True)
        yield found


def _in_memory(leaves: Sequence[Array]) -> int:
    """Write leaves to a file in anonymous memory, each from a page boundary on. Returns the file's descriptor."""
    memory = os.memfd_create("feedline-batch")
    with open(memory, "wb", closefd=False) as file:
        file.truncate(sum(_whole_pages(leaf.nbytes) for leaf in leaves) or 1)
        for leaf in leaves:
            start = file.tell()
            file.write(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
            file.seek(start + _whole_pages(leaf.nbytes))
    return memory


def _leaves_in(memory: int, forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
    """Map the leaves of a file from `_in_memory`, and close the file. Its memory is freed with the last leaf."""
    try:
        mapped = mmap.mmap(memory, 0)
    except OSError as error:
        _check_may_open(error)
        raise
    finally:
        os.close(memory)
    leaves: list[Array] = []
    start = 0
    for shape, dtype in forms:
        nbytes = math.prod(shape) * dtype.itemsize
        leaves.append(np.frombuffer(mapped, np.uint8, nbytes, start).view(dtype).reshape(shape))
        start += _whole_pages(nbytes)
    return leaves


def _check_may_open(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise FeedError(
            "each batch from a worker keeps a file of this process open until the batch is freed, and no more can "
            f"be opened ({error.strerror}); keep fewer batches, or raise the limit (ulimit -n)",
            stage="read",
        ) from error


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _serve(to_parent: Connection, settings: JaxSettings, pickled: bytes) -> None:
    """Run a worker: send None once the source is open; then send the batch of each number that arrives.

    After each batch, the worker sends the descriptor of the file that contains the batch's leaves. Instead of None
    or a batch, it may send an error and its traceback.
    """
    _prepare(settings)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe, or has ended
        try:
            batches = LocalBatches(*pickle.loads(pickled))
        except Exception as error:  # noqa: BLE001  of any type, from the source or the user's classes
            to_parent.send(_with_traceback(error))
            return
        to_parent.send(None)
        while True:
            number = to_parent.recv()
            try:
                batch, memory = _made(batches, number)
            except Exception as error:  # noqa: BLE001  whatever a transform raises
                to_parent.send(_with_traceback(error))
                continue
            to_parent.send(batch)
            with _as_socket(to_parent) as receiver:
                reduction.sendfds(receiver, [memory])
            os.close(memory)


def _made(batches: LocalBatches, number: int) -> tuple[HostBatch, int]:
    """Make a batch. Returns it with (shape, dtype) for leaves, and the descriptor of the leaves' memory."""
    batch = batches.read(number, 0)
    assert batch is not None  # `read` returns None while parts of a batch are missing; this batch has one part
    watch, thread = Stopwatch(), f"worker {os.getpid()}"
    memory = _in_memory(batch.leaves)
    copy_s, copy_cpu_s = watch.lap()
    (part,) = batch.parts
    part = part._replace(thread=thread, stage_s=part.stage_s + copy_s, host_cpu_s=part.host_cpu_s + copy_cpu_s)
    forms: Any = [(leaf.shape, leaf.dtype) for leaf in batch.leaves]
    return batch._replace(leaves=forms, parts=[part]), memory


def _prepare(settings: JaxSettings) -> None:
    """Set up this worker process before the source is unpickled.

    Without JAX's settings, unpickling would narrow a 64-bit `jax.Array` to which a transform refers.
    """
    # Ctrl-C, launchers and Slurm send signals to every process of a job, but the trainer needs batches until it
    # has saved. Not SIG_IGN, which programs that the worker starts would inherit
    for number in _OF_THE_JOB:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_JOB)
    threading.Thread(target=_end_with_parent, name="feedline-parent", daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # JAX must not allocate memory on the trainer's accelerator
    settings.apply_everywhere()


def _end_with_parent() -> None:
    """End this worker once its parent has ended, even if the parent was killed or called `os._exit`.

    Python itself ends workers only at a normal exit. `join` waits for a pipe that closes when the parent ends.
    Rejected: PR_SET_PDEATHSIG, which fires when the *thread* that started the worker ends.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _with_traceback(error: Exception) -> tuple[Exception, str]:
    """Return an error that can be pickled, and its traceback as text.

    If `error` cannot be pickled, the result is a WorkerError with its message.
    """
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a class does while it is pickled
        kind, words = type(error).__qualname__, "its message is not available"
        with contextlib.suppress(Exception):
            words = str(error)
        error = WorkerError(f"a worker process raised {kind}, which cannot be pickled: {words}", stage="read")
    return error, text
