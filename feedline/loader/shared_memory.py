"""Shared memory that carries the leaves of a batch from a worker process to its parent."""

from __future__ import annotations

import math
import mmap
import os
import secrets
import shutil
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from feedline.errors import WorkerError
from feedline.rows.spec import Array

_FOLDER = "/dev/shm"
"""Where Linux keeps shared memory."""
_Form = tuple[tuple[int, ...], np.dtype[Any]]


class SharedLeaves:
    """The leaves of one batch in shared memory. It is pickled once, and unpickled as the list of leaves.

    If it is dropped before it was pickled, its maker removes the memory. If all processes are killed between
    pickling and unpickling, Python's resource tracker removes it.

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
            shared = SharedMemory(f"feedline-{os.getppid()}-{secrets.token_hex(8)}", create=True, size=size)
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
