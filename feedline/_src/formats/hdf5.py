"""HDF5 files, read by h5py: numbers as columns, bytes and text as encoded rows.

HDF5 serves one thread of a process at a time; worker processes read in parallel. A file is opened for each read: a
process that has it open could not write it, and each worker process needs its own. Of an object in a store, h5py
reads ranges, unless it has values of any length: they lie in a heap, of which nobody knows the places in advance.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, require
from feedline._src.formats.table import Column, FileArray, Grouped, Leaf, check_lengths, check_memory
from feedline._src.rows.shards import EvenLengths, Indices
from feedline._src.rows.spec import is_numeric
from feedline._src.runtime.ending import check_may_read, stop_reads

Array = npt.NDArray[Any]
T = TypeVar("T")
Part = tuple[int, bytes]
"""Bytes of a file and where they begin."""
_MOST_IN_MEMORY_BYTES = 1 << 26
"""Beside contiguous datasets, others such as compressed labels are read into memory, up to this size in total."""
_GROUP_BYTES = 1 << 16  # of a group of rows of a dataset without chunks
_SMALL_BYTES = 1 << 14
_MOST_KEPT = 256
"""Reads of up to 16 KiB of an object in a store are of metadata: the last ones stay in memory, 4 MiB at most."""
_EXIT_WAITS_S = 1.0
"""For the read in progress. With what closing feeds takes, the exit stays below two seconds."""
_DAMAGED = "the file is damaged, write it again with h5py"

_lock = threading.RLock()


@functools.cache
def _h5py() -> Any:
    """The library h5py, with hooks of forks and of the exit.

    The newest hook is called first. These are newer than h5py's: a thread that reads takes `_lock` and then h5py's
    lock, so a fork must take them in this order, too. Two threads may register them twice, which is harmless.
    """
    h5py = require("h5py", "hdf5")
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    atexit.register(_end_reads)
    return h5py


def _end_reads() -> None:
    """Wait for the read in progress, and let none begin.

    The interpreter ends daemon threads. One that ended inside HDF5 would keep h5py's own lock, for which the exit
    would wait. So a process whose read does not end leaves at once. Python does not show its status to hooks of
    the exit; 1 does not claim a success.
    """
    stop_reads()
    if _lock.acquire(timeout=_EXIT_WAITS_S):
        return
    with contextlib.suppress(OSError, ValueError):  # they may be closed
        print(
            f"feedline: a read of an HDF5 file had not ended {_EXIT_WAITS_S:.0f} s after the program, so the "
            "process leaves with status 1 and without the rest of its exit; close feeds before the end",
            file=sys.stderr,
        )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of a row: a dataset, or a field of its compound elements."""

    dataset: str
    fields: tuple[str, ...]
    """The names that lead to the field, outermost first."""
    row: Leaf
    shape: tuple[int, ...]
    elements: np.dtype[Any]
    height: int
    """How many rows are read at once."""
    start: int | None
    """The first byte of a contiguous dataset that NumPy can use as it lies in the file; else None."""
    chunks: Array
    """int64[k, 3], for each chunk its group of rows, offset and length, sorted."""

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.elements.itemsize

    def of(self, elements: Any) -> Any:
        """The leaf of some elements of its dataset, in memory or in the file."""
        return functools.reduce(lambda inner, name: inner[name], self.fields, elements)

    def rows_of(self, group: int) -> slice:
        return slice(group * self.height, min((group + 1) * self.height, self.rows))

    def extents(self, group: int) -> list[tuple[int, int]]:
        """Offset and length of each part of the bytes of a group, where they are known."""
        if self.start is not None:
            row_bytes, rows = self.nbytes // max(1, self.rows), self.rows_of(group)
            return [(self.start + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)]
        first, last = np.searchsorted(self.chunks[:, 0], [group, group + 1])
        return [(offset, length) for _, offset, length in self.chunks[first:last].tolist()]


def open_hdf5(file: File, options: OpenOptions) -> Grouped:
    """The datasets of a file, read in groups, which are the rows of a chunk; or with bytes, row by row."""
    reader = _Reader(file)
    tree = _tree_of(reader, options)
    leaves: list[_Leaf] = jax.tree.leaves(tree)
    if any(leaf.elements.hasobject for leaf in leaves):
        file.path()  # fetches an object whole, in many requests at once
        reader.is_whole = True

    def read(number: int, group: int) -> Column:
        leaf, rows = leaves[number], leaves[number].rows_of(group)
        return Column(reader.use(lambda opened: _read_from(opened, leaf, rows), leaf.extents(group)))

    def read_rows(numbers: Sequence[int], rows: Indices) -> list[list[Any]]:
        unique, places = np.unique(rows, return_inverse=True)
        asked: Any = unique
        if len(unique) and unique[-1] - unique[0] == len(unique) - 1:
            asked = slice(int(unique[0]), int(unique[-1]) + 1)  # faster than a list of rows
        found = reader.use(lambda opened: [_read_from(opened, leaves[number], asked) for number in numbers])
        return [
            [_bytes_of(value) if isinstance(leaves[number].row, str) else value for value in values[places]]
            for number, values in zip(numbers, found, strict=True)  # [places] copies: a decoder may change its row
        ]

    def in_file(leaf: _Leaf) -> Any:
        """A leaf where it lies; or in memory, if it is a small one."""
        if leaf.start is not None:
            return leaf.of(FileArray.of(file, leaf.elements, leaf.shape, leaf.start))
        extents = [extent for group in range(-(-leaf.rows // leaf.height)) for extent in leaf.extents(group)]
        try:
            return reader.use(lambda opened: _read_from(opened, leaf, slice(0, leaf.rows)), extents)
        except ValueError as error:
            raise ValueError(f"{file.name} cannot be mapped: {error}") from error

    has_bytes = any(isinstance(leaf.row, str) for leaf in leaves)
    others = {leaf.dataset: leaf.nbytes for leaf in leaves if leaf.start is None}
    lies_in_file = any(leaf.start is not None for leaf in leaves) and sum(others.values()) <= _MOST_IN_MEMORY_BYTES
    return Grouped(
        jax.tree.map(lambda leaf: leaf.row, tree),
        [EvenLengths(leaf.rows, leaf.height) for leaf in leaves],
        read,
        read_rows if has_bytes else None,
        arrays=(lambda: [jax.tree.map(in_file, tree)]) if lies_in_file and not has_bytes else None,
        extents=lambda leaf, group: () if reader.is_whole else leaves[leaf].extents(group),
    )


FORMAT = Format(
    "hdf5", (".h5", ".hdf5"), takes=frozenset({"columns", "cache_bytes"}), extra="hdf5", open=open_hdf5
)


def _bytes_of(value: Any) -> bytes:
    return bytes(value.tobytes() if isinstance(value, np.ndarray | np.void) else value)


class _Reader:
    """Opens a file for each read. Of an object in a store, the pieces that most reads need stay in memory.

    Nothing is fetched while HDF5 reads, since h5py keeps its lock meanwhile: the thread that fetches may need it,
    to free an object of h5py for example, and would wait for the one that waits for it (seen). So h5py gets the
    bytes that are there. What it misses is fetched after it has given up, and then it reads again.
    """

    def __init__(self, file: File) -> None:
        self.file, self.is_whole = file, file.has_path
        self._kept: list[Part] = []

    def use(self, function: Callable[[Any], T], extents: Sequence[tuple[int, int]] = ()) -> T:
        """What a function of the `h5py.File` returns, while no other thread uses HDF5. It may be called again.

        Args:
          extents: offset and length of bytes that it needs, as far as they are known.
        """
        if self.is_whole:
            return self.file.with_path(lambda path: _used(path, function))
        offsets, lengths = np.array(extents, np.int64).reshape(-1, 2).T
        parts = [*self._kept, *zip(offsets.tolist(), self.file.read(offsets, lengths), strict=True)]
        while True:
            try:
                return _used(_BytesThere(self.file.size, parts), function)
            except _MissingError as missing:
                start, length = missing.args
                if length > _SMALL_BYTES:
                    parts.append((start, self.file.read(np.array([start]), np.array([length]))[0]))
                else:
                    parts.append((start, self.file.samples([(start, _SMALL_BYTES)])[0]))
                    self._kept = [*self._kept, parts[-1]][-_MOST_KEPT:]


def _used(source: Any, function: Callable[[Any], T]) -> T:
    h5py = _h5py()
    with _lock:
        check_may_read()
        for other in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE):
            if other.get_intent() != h5py.h5f.ACC_RDONLY and os.fsdecode(other.name) == source:
                # HDF5 would share its state with us, of which not all may lie on disk yet
                raise ValueError("it is already open for writing in this process")
        with h5py.File(source, "r", locking="best-effort") as opened:
            return function(opened)


class _MissingError(Exception):
    """h5py needs other bytes: their offset and length."""


class _BytesThere(io.RawIOBase):
    """A file object with some parts of a file of `size` bytes."""

    def __init__(self, size: int, parts: Sequence[Part]) -> None:
        self._size, self._parts, self._at = size, parts, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start, stop = self._at, min(self._at + len(buffer), self._size)
        for at, data in self._parts:
            if at <= start and stop <= at + len(data):
                buffer[: stop - start] = memoryview(data)[start - at : stop - at]
                self._at = stop
                return stop - start
        raise _MissingError(start, stop - start)


def _read_from(file: Any, leaf: _Leaf, rows: Any) -> Array:
    try:
        return np.ascontiguousarray(leaf.of(file[leaf.dataset][rows]))
    except (OSError, RuntimeError, KeyError) as error:  # of HDF5, for damage
        raise ValueError(f"{leaf.dataset}: {error}; {_DAMAGED}") from error


# --- what a file has ---


class _RefusedError(ValueError):
    """A dataset is valid, but cannot be read as rows. The message says what to change."""


def _tree_of(reader: _Reader, options: OpenOptions) -> dict[str, Any]:
    """The chosen leaves of a file: nested dicts of `_Leaf`, as groups and compound types nest."""
    path = reader.file.name
    try:
        tree, refused = reader.use(lambda opened: _chosen(opened, reader.file, options))
    except FeedError:
        raise
    except Exception as error:  # of many types, for damaged files
        if isinstance(error, ValueError) and path in str(error):
            raise
        message = f"{path} cannot be read as an HDF5 file: {str(error) or type(error).__name__}. "
        if "unable to lock" in message or "already open for" in message:
            raise ValueError(
                f"{message}A file must not be open for writing: close it in the program that writes it, or, if "
                "that was killed, run h5clear -s (Debian: hdf5-tools) and check the data"
            ) from error
        raise ValueError(f"{message}It may be truncated or another format; write it again with h5py") from error
    check_lengths(tree, refused, "an HDF5 file", "dataset", path)
    return tree


def _chosen(opened: Any, file: File, options: OpenOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """The chosen leaves of a file; and by name, why datasets and groups have no rows."""
    tree: dict[str, Any] = {}
    refused: dict[str, str] = {}
    paths = [name for name in options.columns or () if "/" in name]
    for name in options.chosen([*opened, *paths], file.name) if len(opened) else []:
        try:
            found = _node(opened, name, file, ())
        except _RefusedError as error:
            refused[name] = str(error)
            continue
        if found:
            *outer, last = [part for part in name.split("/") if part]
            functools.reduce(lambda inner, part: inner.setdefault(part, {}), outer, tree)[last] = found
        elif options.columns is not None:
            refused[name] = "no rows: a scalar or an empty group"
    return tree, refused


def _node(node: Any, path: str, file: File, above: tuple[int, ...]) -> _Leaf | dict[str, Any]:
    """The dataset or group at a path from a group, as its leaves; a scalar has none."""
    h5py = _h5py()
    for part in filter(None, path.split("/")):
        link = node.get(part, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            raise _RefusedError("nothing is there")
        if isinstance(link, h5py.ExternalLink):  # which HDF5 would open
            raise _RefusedError(f"a link to the file {link.filename}; open that file itself")
        if isinstance(link, h5py.SoftLink):  # which may lead through another file
            raise _RefusedError(f"a link to {link.path}; choose that itself with columns=[...]")
        node = node[part]
    if isinstance(node, h5py.Dataset) and node.shape:
        return _dataset(node, file)
    if not isinstance(node, h5py.Group):
        return {}
    address = h5py.h5o.get_info(node.id).addr
    if address in above:
        raise _RefusedError("a link to a group that it lies in; leave it out with columns=[...]")
    found = {child: _node(node, child, file, (*above, address)) for child in node}
    return {child: leaves for child, leaves in found.items() if leaves}


def _dataset(dataset: Any, file: File) -> _Leaf | dict[str, Any]:
    """The leaf of an `h5py.Dataset`, or those of its fields. ValueError: it is damaged."""
    h5py = _h5py()
    created = dataset.id.get_create_plist()
    layout, filters = created.get_layout(), [created.get_filter(i) for i in range(created.get_nfilters())]
    lacking = [name or number for number, *_, name in filters if not h5py.h5z.filter_avail(number)]
    if layout == h5py.h5d.VIRTUAL or created.get_external_count() or lacking:
        raise _RefusedError(
            "its data must lie in the file itself, with filters that this h5py has, and it is virtual, in "
            f"external files, or has the filters {lacking}; open those files themselves, install hdf5plugin and "
            "import it before, or write it again: new.create_dataset(name, data=old[name][:])"
        )
    try:
        elements = dataset.dtype
    except TypeError as error:
        raise _RefusedError(f"its elements must be numbers that NumPy has, bytes or text: {error}") from error
    rows, chunk = dataset.shape[0], dataset.chunks
    row_bytes = math.prod(dataset.shape[1:]) * elements.itemsize
    height = chunk[0] if chunk else max(1, _GROUP_BYTES // max(1, row_bytes))
    needed = max(min(height, rows) * row_bytes, math.prod(chunk or ()) * elements.itemsize)
    check_memory(file.name, f"rows of {dataset.name} that are read at once", needed)
    chunks = _chunks_of(dataset, {number for number, *_ in filters}, file)
    start = None
    is_written = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED and dataset.id.get_storage_size()
    if layout == h5py.h5d.CONTIGUOUS and is_written:
        start = dataset.id.get_offset()
        if start + rows * row_bytes > file.size:
            raise ValueError(f"{file.name}: {dataset.name} leads out of the file; {_DAMAGED}")
        if elements.hasobject or h5py.h5t.py_create(elements, logical=True) != dataset.id.get_type():
            start = None  # h5py must convert them

    def leaves(dtype: np.dtype[Any], *fields: str) -> _Leaf | dict[str, Any]:
        if dtype.names is not None:
            return {name: leaves(dtype[name], *fields, name) for name in dtype.names}
        row = _row_of(dtype, dataset.shape[1:])
        return _Leaf(dataset.name, fields, row, dataset.shape, elements, height, start, chunks)

    return leaves(elements)


def _chunks_of(dataset: Any, filters: set[int], file: File) -> Array:
    """The `chunks` of a leaf. ValueError: they lie outside of the file, or HDF5 would read beyond their bytes."""
    h5z, found = _h5py().h5z, list[tuple[int, int, int]]()
    if dataset.chunks is None:
        return np.empty((0, 3), np.int64)
    least = 1
    if filters <= {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}:
        least = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    height = dataset.chunks[0]
    dataset.id.chunk_iter(
        lambda chunk: found.append((chunk.chunk_offset[0] // height, chunk.byte_offset, chunk.size))
    )
    chunks = np.array(sorted(found), np.int64).reshape(-1, 3)
    offset, size = chunks[:, 1], chunks[:, 2]
    if not ((offset >= 0) & (size >= least) & (size <= file.size) & (offset <= file.size - size)).all():
        raise ValueError(
            f"{file.name}: chunks of {dataset.name} must have {least} bytes or more of the {file.size} of the "
            f"file, and one has not; {_DAMAGED}"
        )
    return chunks


def _row_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Leaf:
    """What a row of such elements is: numbers of one shape, or a single value of any length."""
    h5py = _h5py()
    values = h5py.check_vlen_dtype(dtype)
    is_opaque = dtype.kind == "V" and dtype.subdtype is None
    if not isinstance(values, np.dtype) and h5py.check_string_dtype(dtype) is None and not is_opaque:
        return jax.ShapeDtypeStruct((*shape, *dtype.shape), _number(dtype.base))
    if shape:
        raise _RefusedError(f"a row must have one value of bytes or text, and has {list(shape)} of them")
    if not isinstance(values, np.dtype) or _number(values).itemsize == 1:
        return "bytes"
    if not values.isnative:  # h5py gives their bytes as they are stored, with the other dtype
        raise _RefusedError(f"numbers of variable length must be {values.newbyteorder('=')}, not {values.str}")
    return f"bytes of {_number(values)}"


def _number(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of numbers or booleans, without h5py's notes in it."""
    if dtype.kind not in "mMOSV" and is_numeric(dtype):
        return np.dtype(dtype.str)
    found = "references" if _h5py().check_ref_dtype(dtype) is not None else str(dtype)
    raise _RefusedError(
        f"its elements must be numbers or booleans that JAX has, bytes or text, and are {found}; encode them as "
        "numbers, dates by array.view(numpy.int64), or leave the dataset out with columns=[...]"
    )
