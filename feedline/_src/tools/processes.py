"""A `map` over processes on this machine. The processes never outlive the `map` or its caller."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from feedline._src.errors import WorkerError
from feedline._src.tools.cli.interrupt import interrupts_wait


def map_in_processes(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Generator[Any]:
    """Call the function on each item, in spawned processes. Yields each result as soon as it is ready.

    The processes end when the iterator is closed, even during a call, or when this process ends, even by SIGKILL.

    Raises:
      TypeError: the function cannot be pickled.
      WorkerError: a process was killed, or did not start.
      Exception: whatever the function raises.
    """
    try:
        pickled = pickle.dumps(function)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"each process gets a copy of the source, and this source cannot be pickled: {error}; give it "
            "`__reduce__`, define its functions in a module, or convert with workers=0"
        ) from error
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, spawn, initializer=_end_with, initargs=(theirs,))
    try:
        with interrupts_wait():  # the processes inherit the blocked SIGINT, so a Ctrl-C reaches only this process
            futures = [pool.submit(_call, pickled, item) for item in items]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that converts was killed, crashed, or did not start: the host may be out of memory (use "
            "fewer workers), or a script has no `if __name__ == '__main__':` around its call of convert; "
            "finished files are kept, so run the conversion again"
        ) from error
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _end_with(parent: Connection) -> None:
    """End this process when its parent ends, or closes its own end of the pipe."""

    def wait() -> None:
        with contextlib.suppress(EOFError):
            parent.recv_bytes()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _call(pickled: bytes, item: Any) -> Any:
    return _unpickled(pickled)(item)


@functools.lru_cache(maxsize=1)  # unpickling opens the source
def _unpickled(function: bytes) -> Callable[[Any], Any]:
    return pickle.loads(function)  # type: ignore[no-any-return]
