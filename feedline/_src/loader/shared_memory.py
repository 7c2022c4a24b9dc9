"""Shared memory that carries the leaves of a batch from a worker process to its parent."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import multiprocessing
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from feedline._src.errors import WorkerError
from feedline._src.rows.spec import Array

_FOLDER = "/dev/shm"
"""Where Linux keeps shared memory."""
_making = threading.Lock()
"""Held while a name is made, so that none is made once a worker has begun to remove its own."""
_Form = tuple[tuple[int, ...], np.dtype[Any]]


class SharedLeaves:
    """The leaves of one batch in shared memory. It is pickled once, and unpickled as the list of leaves.

    If it is dropped before it was pickled, its maker removes the memory. If its maker ends between pickling and
    unpickling, the parent removes it. If that ends, too, Python's resource tracker does; without one, the next
    program with workers.

    The memory is written as a file, not through a mapping: then a full /dev/shm is an error, not a SIGBUS.

    Args:
      leaves: arrays of any strides.

    Raises:
      WorkerError: /dev/shm is full.
    """

    def __init__(self, leaves: Sequence[Array]) -> None:
        self._forms: list[_Form] = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._to_remove: SharedMemory | None = None
        size = max(1, sum(_next_page(leaf.nbytes) for leaf in leaves))
        try:
            with _making:
                shared = SharedMemory(f"{_own_prefix()}{secrets.token_hex(8)}", create=True, size=size)
            self._to_remove = shared
            shared.close()
            with open(os.path.join(_FOLDER, shared.name), "r+b") as file:
                for leaf in leaves:
                    file.seek(_next_page(file.tell()))
                    file.write(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise shared_memory_failed(error, size) from error

    def __reduce__(self) -> Any:
        shared, self._to_remove = self._to_remove, None
        assert shared is not None, "shared leaves are pickled once"
        return _receive, (shared.name, self._forms)

    def __del__(self) -> None:
        if self._to_remove is not None:
            self._to_remove.unlink()


def _receive(name: str, forms: Sequence[_Form]) -> list[Array]:
    """The leaves, which lie in the shared memory `name`, each on a page border. Removes the name at once.

    The memory is freed with the last of the leaves, without any Python code, so that a batch that nobody takes
    leaves nothing behind.
    """
    with open(os.path.join(_FOLDER, name), "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    shared = SharedMemory(name)
    shared.close()
    shared.unlink()  # tells the resource tracker, too
    leaves: list[Array] = []
    end = 0
    for shape, dtype in forms:
        count = math.prod(shape) * dtype.itemsize
        leaves.append(np.frombuffer(memory, np.uint8, count, end).view(dtype).reshape(shape))
        end = _next_page(end + count)
    return leaves


def remove_of_workers(pids: Sequence[int]) -> None:
    """Remove what workers of this process, which have ended, sent and nobody will receive."""
    _remove(tuple(_prefix(os.getpid(), pid) for pid in pids))


def remove_of_this_worker() -> None:
    """Remove what this worker made, and let none of its threads make more: its parent, the receiver, has ended.

    Python's resource tracker removes only what it was told of, just after the memory was made.
    """
    _making.acquire()  # for good: the worker ends now
    _remove((_own_prefix(),))


def _remove(prefixes: tuple[str, ...]) -> None:
    for name in _names(prefixes):
        with contextlib.suppress(FileNotFoundError):
            try:
                shared = SharedMemory(name)
                shared.close()
                shared.unlink()  # tells the resource tracker, too
            except ValueError:  # it has no size yet, and the tracker does not know it
                os.unlink(os.path.join(_FOLDER, name))


def remove_of_ended_programs() -> None:
    """Remove what programs of this user left that were killed with all their processes."""
    for name in _names("feedline-"):
        words = name.split("-")
        with contextlib.suppress(OSError):  # of another user, or just removed
            if words[3] == _pid_namespace() and not os.path.exists(f"/proc/{words[1]}"):
                os.unlink(os.path.join(_FOLDER, name))


def _prefix(parent: int, worker: int) -> str:
    """What names begin with. Containers may share /dev/shm and have process ids of their own."""
    return f"feedline-{parent}-{worker}-{_pid_namespace()}-"


def _own_prefix() -> str:
    """Of what this worker makes. Not by `os.getppid`, which changes once the parent has ended."""
    parent = multiprocessing.parent_process()
    return _prefix(os.getpid() if parent is None or parent.pid is None else parent.pid, os.getpid())


@functools.cache
def _pid_namespace() -> str:
    """A number for the set of processes in which a process id is unique."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _names(prefixes: str | tuple[str, ...]) -> list[str]:
    """The names of shared memory that begin with one of these, and have the form of `_prefix`."""
    return [name for name in os.listdir(_FOLDER) if name.startswith(prefixes) and name.count("-") == 4]


def _next_page(offset: int) -> int:
    """The first page border at or after `offset`."""
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


def shared_memory_failed(error: OSError, size: int | None = None) -> WorkerError:
    """The error to raise where the operating system could not provide shared memory.

    Args:
      size: of the batch, in bytes.
    """
    space = shutil.disk_usage(_FOLDER)
    batch = "" if size is None else f", and a batch takes {size:,} bytes"
    return WorkerError(
        f"workers hand batches over in {_FOLDER}, which must have room for them: {error}; it has {space.total:,} "
        f"bytes, of which {space.free:,} are free{batch}. Docker gives it 64 MB unless a container is started "
        "with, for example, --shm-size=8g; else use fewer workers, a smaller Reading.buffer or batch_size, or "
        "threads",
        stage="read",
    )
