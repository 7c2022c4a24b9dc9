"""A `map` over processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from feedline._src.errors import WorkerError

Running = dict[Connection, SpawnProcess]


@contextlib.contextmanager
def mapped_in_processes(workers: int) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]]:
    """Within the `with` block, a `map` over spawned processes. Results come as soon as they are ready.

    Functions, items and results must pickle. The processes end with the block. If this process is killed, each
    ends after its item.

    Raises, from the `map`:
      TypeError: the function cannot be pickled.
      WorkerError: a process ended without a result.
      Exception: what the function raised.
    """
    running: Running = {}
    try:
        yield functools.partial(_map, running, workers)
    finally:
        for pipe, process in running.items():
            process.kill()
            process.join()
            pipe.close()


def _map(running: Running, workers: int, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    pickled = _pickled(function)
    waiting = list(reversed(items))
    _start(running, min(workers, len(items)))
    busy = []
    for pipe in list(running)[: len(items)]:
        pipe.send((pickled, waiting.pop()))
        busy.append(pipe)
    while busy:
        for ready in wait(busy):
            assert isinstance(ready, Connection)
            result = _received(ready, running[ready])
            if waiting:
                ready.send((None, waiting.pop()))
            else:
                busy.remove(ready)
            yield result


def _start(running: Running, count: int) -> None:
    """Start processes until there are as many."""
    spawn = multiprocessing.get_context("spawn")
    while len(running) < count:
        ours, theirs = spawn.Pipe()
        running[ours] = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        running[ours].start()
        theirs.close()  # so that the end of the process is the end of the pipe


def _pickled(function: Callable[[Any], Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"each process gets a copy of the source, and this source cannot be pickled: {error}; give it "
            "`__reduce__`, define its functions in a module, or convert with workers=0"
        ) from error


def _received(pipe: Connection, process: SpawnProcess) -> Any:
    try:
        result, error = pipe.recv()
    except EOFError:
        process.join()
        raise WorkerError(
            f"a process that converts ended with exit code {process.exitcode}: the host may be out of memory, or "
            "a script has no `if __name__ == '__main__':` around feedline.convert(workers=...). Finished files "
            "are kept"
        ) from None
    if error is not None:
        raise error
    return result


def _serve(pipe: Connection) -> None:
    """The main function of a process: it answers until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    function: Callable[[Any], Any] | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            pickled, item = pipe.recv()
            try:
                if pickled is not None:
                    function = pickle.loads(pickled)  # opens the source
                assert function is not None
                answer: Any = function(item), None
            except Exception as error:  # noqa: BLE001  # the parent raises it
                answer = None, error
            pipe.send(answer)
