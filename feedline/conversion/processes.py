"""A `map` over processes of this machine."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from feedline.errors import WorkerError


def map_in_processes(workers: int, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """The results of `function` for all items, in the order in which they are ready.

    Processes are spawned, and end with the iterator. A process whose parent was killed ends after its item.

    Args:
      function: picklable, as items and results are. Each process unpickles it once.

    Raises:
      TypeError: `function` cannot be pickled.
      WorkerError: a process ended without a result.
      Exception: what `function` raised; processes do not begin other items then.
    """
    pickled = _pickled(function)
    waiting = list(reversed(items))
    spawn = multiprocessing.get_context("spawn")
    running: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(workers, len(items))):
            ours, theirs = spawn.Pipe()
            running[ours] = spawn.Process(target=_serve, args=(theirs, pickled), daemon=True)
            running[ours].start()
            theirs.close()  # so that the end of the process is the end of the pipe
            ours.send(waiting.pop())
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                yield _received(pipe, running[pipe])
                if waiting:
                    pipe.send(waiting.pop())
                else:
                    pipe.close()
                    running.pop(pipe).join()
    finally:
        for pipe, process in running.items():
            process.kill()
            process.join()
            pipe.close()


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
            "a script calls feedline.convert(workers=...) outside of `if __name__ == '__main__':`; finished shards "
            "are kept",
        ) from None
    if error is not None:
        raise error
    return result


def _serve(pipe: Connection, pickled: bytes) -> None:
    """The main function of a process: results for the items that come, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    function: Callable[[Any], Any] | None = None
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            function = pickle.loads(pickled) if function is None else function  # opens the source
            answer: Any = function(item), None
        except Exception as error:  # noqa: BLE001  # the parent raises it
            answer = None, error
        pipe.send(answer)
