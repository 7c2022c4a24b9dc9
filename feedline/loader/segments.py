"""How a batch gets from a worker process to its parent: in a shared-memory segment, whose name goes on arrival."""

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


class Segment:
    """The leaves of one batch in shared memory. A worker makes it and pickles it, once, as a `ReceivedSegment`.

    One that is dropped before it was pickled is removed by its maker. What is on its way when all processes are
    killed is removed by Python's resource tracker.

    It is written as a file, not through a mapping: a full /dev/shm is then an error, not a SIGBUS.

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
        assert shared is not None, "a segment is pickled once"
        return ReceivedSegment, (shared.name, self._forms)

    def __del__(self) -> None:
        if self._to_remove is not None:
            self._to_remove.unlink()


class ReceivedSegment:
    """A segment in the process that unpickled it, and removed its name at once.

    Attributes:
      leaves: they lie in the shared memory, each on a page border. It is freed with the last of them, without any
        Python code, wherever that happens. So a batch that nobody takes leaves nothing behind either.
    """

    def __init__(self, name: str, forms: Sequence[_Form]) -> None:
        with open(os.path.join(_FOLDER, name), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        shared = SharedMemory(name)
        shared.close()
        shared.unlink()  # tells the resource tracker, too
        self.leaves: list[Array] = []
        end = 0
        for shape, dtype in forms:
            count = math.prod(shape) * dtype.itemsize
            self.leaves.append(np.frombuffer(memory, np.uint8, count, end).view(dtype).reshape(shape))
            end = _next_page(end + count)


def _next_page(offset: int) -> int:
    """The first page border that is not before it."""
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


def shared_memory_failed(error: OSError, size: int | None = None) -> WorkerError:
    """What to tell of an error that the operating system gave where workers share memory.

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
