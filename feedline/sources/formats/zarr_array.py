"""One Zarr array on a local disk, read by TensorStore; its metadata are checked first, and watched."""

from __future__ import annotations

import json
import math
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.errors import RowError
from feedline.rows.spec import is_numeric
from feedline.sources.formats import extras
from feedline.sources.formats.file_version import FileVersion

Array = npt.NDArray[Any]
_SHARD_ENTRY_BYTES = 16  # in the index of a Zarr shard: offset and length of one inner chunk


class ZarrArray:
    """An open array. It is read for as long as its metadata file stays the one that was opened.

    Args:
      path: of its folder.
      fill: whether a missing chunk has the fill value of the metadata; else it is an error.

    Raises:
      ValueError, TypeError: the metadata cannot be read, or are those of no rows of numbers.
    """

    def __init__(self, path: Path, fill: bool) -> None:
        self._path = path
        is_v3 = (path / "zarr.json").is_file()
        self.metadata = path / ("zarr.json" if is_v3 else ".zarray")
        self.version = FileVersion.of(self.metadata)  # before it is read: a later change is then seen in any case
        has_fill = read_metadata(self.metadata).get("fill_value") is not None
        spec = {
            "driver": "zarr3" if is_v3 else "zarr",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "fill_missing_data_reads": fill and has_fill,
        }
        tensorstore = extras.need("tensorstore", "zarr")
        try:
            self._store = tensorstore.open(spec, open=True, read=True).result()
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as a Zarr array: {error}; write it again") from error
        if self._store.rank == 0:
            raise ValueError(f"{path}: an array needs a first axis that counts rows, got a scalar")
        if not is_numeric(self._store.dtype.numpy_dtype):
            raise TypeError(
                f"{path}: an accelerator holds numbers and booleans, got dtype {self._store.dtype.name}; encode "
                "it as numbers first"
            )
        self.shape = tuple(self._store.shape)
        self.dtype = np.dtype(self._store.dtype.numpy_dtype)
        self.height = max(1, self._store.chunk_layout.read_chunk.shape[0])
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse what TensorStore could not allocate: it ends the process then, without an exception."""
        layout = self._store.chunk_layout
        chunk, shard = layout.read_chunk.shape, layout.write_chunk.shape  # one and the same without shards
        item, row = self.dtype.itemsize, math.prod(self.shape[1:])
        needs = {
            "a row of its chunks": min(self.height, self.shape[0]) * row * item,
            "one of its chunks": math.prod(chunk) * item,
            "the index of one of its shards": math.prod(shard) // max(1, math.prod(chunk)) * _SHARD_ENTRY_BYTES,
        }
        has = _memory_bytes()
        for what, needed in needs.items():
            if needed > has:
                raise ValueError(
                    f"{self._path}: {what} must fit into memory, and takes {needed} bytes of the {has} there are "
                    f"(shape {self.shape}, chunks {tuple(chunk)}, {self.dtype}). Write it again in smaller chunks "
                    f"if {self.metadata.name} is not damaged"
                )

    def chunks(self, group: int) -> Array:
        """The rows of a row of chunks, contiguous in memory.

        Raises:
          FeedError: the metadata file is another one now, or gone.
          ValueError: a chunk is missing or damaged.
        """
        return self._read(slice(group * self.height, min((group + 1) * self.height, self.shape[0])))

    def row(self, row: int) -> Array:
        """One row. RowError if it cannot be read."""
        try:
            rows = self._read(slice(row, row + 1))
        except ValueError as error:
            raise RowError(str(error), stage="read", row=row, file=str(self._path)) from error
        return np.asarray(rows[0])

    def _read(self, rows: slice) -> Array:
        try:
            found: Array = np.ascontiguousarray(_result(self._store[rows].read()))
        except ValueError as error:
            self.version.check(self.metadata)  # that the folder is gone, or another one, is the better reason
            if "NOT_FOUND" not in str(error):
                raise
            raise ValueError(
                f"every chunk must be there, and this read failed with {error}. Restore the chunk; or, if the "
                f"writer left out chunks that hold only the fill value, pass "
                f'missing_chunks="fill" to open_source (the metadata must have a fill value)'
            ) from error
        self.version.check(self.metadata)
        return found


def _memory_bytes() -> int:
    """The most that this process can have: of the machine, or what a limit leaves of it (ulimit -v)."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON object in a metadata file. ValueError if there is none."""
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as the metadata of Zarr: {error}; write it again") from error
    return found


def _result(future: Any) -> Any:
    """What a TensorStore future gives, waited for in Python.

    A wait inside TensorStore aborts the process when the interpreter ends meanwhile ("terminate called without an
    active exception"): CPython then ends the waiting thread in C++ code that does not let it.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
