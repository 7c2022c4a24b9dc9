"""A Zarr array on a local disk, read by TensorStore, with checks of its metadata."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.rows.spec import is_numeric
from feedline._src.sources.formats import extras
from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.grouped_file import memory_bytes

Array = npt.NDArray[Any]
_SHARD_ENTRY_BYTES = 16  # in the index of a Zarr shard: offset and length of one inner chunk


class ZarrArray:
    """An open array. A read fails if the metadata file has changed since.

    Args:
      path: of its folder.
      fill: a missing chunk has the fill value of the metadata, instead of being an error.

    Raises:
      ValueError, TypeError: the metadata cannot be read, or do not describe rows of numbers.
    """

    def __init__(self, path: Path, fill: bool) -> None:
        self._path: object = path
        is_v3 = (path / "zarr.json").is_file()
        self.metadata = path / ("zarr.json" if is_v3 else ".zarray")
        self.version = FileVersion.of(self.metadata)  # before it is read, so that no later change is missed
        has_fill = read_metadata(self.metadata).get("fill_value") is not None
        spec = {
            "driver": "zarr3" if is_v3 else "zarr",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "fill_missing_data_reads": fill and has_fill,
        }
        tensorstore = extras.require("tensorstore", "zarr")
        try:
            self._store = tensorstore.open(spec, open=True, read=True).result()
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as a Zarr array: {error}; write it again") from error
        self._check(self.metadata.name)

    def _check(self, metadata: str) -> None:
        """Note what the metadata say of the rows of `_store`, which lie at `_path`.

        Raises:
          ValueError, TypeError: they do not describe rows of numbers.
        """
        if self._store.rank == 0:
            raise ValueError(f"{self._path}: an array needs a first axis that counts rows, got a scalar")
        if not is_numeric(self._store.dtype.numpy_dtype):
            raise TypeError(
                f"{self._path}: an accelerator holds numbers and booleans, got dtype {self._store.dtype.name}; "
                "encode it as numbers first"
            )
        self.shape = tuple(self._store.shape)
        self.dtype = np.dtype(self._store.dtype.numpy_dtype)
        self.height = max(1, self._store.chunk_layout.read_chunk.shape[0])
        self._check_memory(metadata)

    def _check_memory(self, metadata: str) -> None:
        """Refuse sizes that TensorStore cannot allocate: it would abort the process, without an exception."""
        layout = self._store.chunk_layout
        chunk, shard = layout.read_chunk.shape, layout.write_chunk.shape  # equal without shards
        item, row = self.dtype.itemsize, math.prod(self.shape[1:])
        needs = {
            "a row of its chunks": min(self.height, self.shape[0]) * row * item,
            "one of its chunks": math.prod(chunk) * item,
            "the index of one of its shards": math.prod(shard) // max(1, math.prod(chunk)) * _SHARD_ENTRY_BYTES,
        }
        has = memory_bytes()
        for what, needed in needs.items():
            if needed > has:
                raise ValueError(
                    f"{self._path}: {what} must fit into memory, and takes {needed} bytes of the {has} there are "
                    f"(shape {self.shape}, chunks {tuple(chunk)}, {self.dtype}). Write it again in smaller chunks "
                    f"if {metadata} is not damaged"
                )

    def chunks(self, group: int) -> Array:
        """The rows of a row of chunks, contiguous in memory.

        Raises:
          FeedError: the metadata file was changed or deleted.
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
            found: Array = np.ascontiguousarray(result_in_python(self._store[rows].read()))
        except ValueError as error:
            self.version.check(self.metadata)  # a deleted or replaced folder explains the error better
            if "NOT_FOUND" not in str(error):
                raise
            raise missing_error(f"this read failed with {error}") from error
        self.version.check(self.metadata)
        return found


def missing_error(found: str) -> ValueError:
    """The error for a chunk that is not there."""
    return ValueError(
        f"every chunk must be there, and {found}. Restore the chunk; or, if the writer left out chunks that hold "
        'only the fill value, pass missing_chunks="fill" to open_source (the metadata must have a fill value)'
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON object in a metadata file. ValueError if there is none."""
    return parsed_metadata(path.read_bytes(), path)


def parsed_metadata(data: bytes, path: object) -> dict[str, Any]:
    """As `read_metadata`, of the bytes of the file."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as the metadata of Zarr: {error}; write it again") from error
    return found


def result_in_python(future: Any) -> Any:
    """The result of a TensorStore future, waited for in Python.

    A wait inside TensorStore would abort the process if the interpreter ends meanwhile ("terminate called without
    an active exception"): CPython then ends the waiting thread inside C++ code that does not allow this.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
