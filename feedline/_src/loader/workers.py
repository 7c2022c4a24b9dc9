"""Sets up worker processes, ends them with their parent, and explains why one ended early."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import resource_tracker

import jax

from feedline._src.errors import WorkerError
from feedline._src.loader.shared_memory import remove_of_this_worker
from feedline._src.runtime.jax_settings import JaxSettings

a_worker_delivered = threading.Event()
"""Set once any worker of this process has delivered a batch: then the script has its `__main__` guard."""

_ENDS = {
    0: "something that it ran ended it: look for sys.exit, os._exit or a library that ends the process, for "
    "example in a transform",
    -7: "the kernel sends signal 7 (SIGBUS) where a mapped file has no memory or data any more: the file became "
    "shorter, its disk failed, or /dev/shm is full (Docker gives it 64 MB; --shm-size=8g gives more)",
    -9: "the kernel sends signal 9 (SIGKILL) when memory runs out, and `dmesg` then says so: use fewer workers, a "
    "smaller Reading.buffer or batch_size, or give the job more memory",
}
"""The meaning of exit codes of a worker, as far as it is known."""
_NO_GUARD = (
    "it ended before its first batch: a script that uses workers must build and run its feed under "
    '`if __name__ == "__main__":`, since every worker imports the script again'
)


@contextlib.contextmanager
def workers_start() -> Iterator[None]:
    """In this context Grain's threads, and with them workers, start with Ctrl-C blocked until `prepare_worker`.

    Otherwise each one that still imports the script would show a KeyboardInterrupt. Not on the main thread, which
    must hear of Ctrl-C while it waits for the workers.
    """
    if threading.current_thread() is threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # not in the context, of which it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker(settings: JaxSettings, index: int, count: int) -> None:
    """Set up a worker process. Called in each one before the source is unpickled there.

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


def never_worked(code: int) -> bool:
    """Whether a worker with this exit code probably failed to start, as the next one would."""
    return code > 0 and not a_worker_delivered.is_set()


def worker_ended(code: int) -> WorkerError:
    """The error to raise when a worker ended before its feed."""
    meaning = _NO_GUARD if never_worked(code) else _ENDS.get(code, "look at what it printed")
    return WorkerError(
        f"a worker process must live as long as its feed, and one ended with exit code {code}: {meaning}",
        stage="read",
    )


def worker_stuck(limit_s: float) -> WorkerError:
    """The error to raise when workers were killed because the next batch did not come."""
    return WorkerError(
        f"a worker process must deliver batches, and no batch came within Reading.stall_error_s = {limit_s:g} s, "
        "so the workers were killed; look for a read or a transform that hangs, or a process that was stopped, or "
        "raise that limit",
        stage="read",
    )


def portable(error: Exception) -> Exception:
    """This exception if it can reach the training process, else one with its words and its traceback.

    One that cannot be pickled would be lost, and the training process would wait for it. Classes of the user's
    script cannot, either: a worker knows the script by another name.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a class does while it is pickled
        kind = type(error).__qualname__
        other = WorkerError(f"a worker process raised {kind}, which cannot be pickled: {error}", stage="read")
        other.add_note("".join(traceback.format_exception(error)))
        return other
    return error
