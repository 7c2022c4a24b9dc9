"""HDF5 files, read by h5py: numbers in groups of rows, bytes and text row by row.

HDF5 serves one thread of a process at a time, so only worker processes read in parallel. A file is opened for each
read, because a process that kept it open could not write to it, and each worker process needs its own handle. An
object in a store is fetched whole. Local files of contiguous datasets are mapped, without HDF5.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
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
from feedline._src.formats.registry import Format, fetched_files, require
from feedline._src.formats.table import (
    Column,
    FileArray,
    Grouped,
    Leaf,
    by_rows,
    check_memory,
    check_same_rows,
    even_groups,
)
from feedline._src.rows.shards import Indices
from feedline._src.rows.spec import is_numeric
from feedline._src.runtime.exit import check_may_read, stop_reads

Array = npt.NDArray[Any]
T = TypeVar("T")
_GROUP_BYTES, _MAX_GROUPS = 1 << 16, 1 << 20  # size and maximum number of groups in a dataset without chunks
_EXIT_WAITS_S = 1.0  # how long the exit waits for a read in progress, after feeds were closed
_DAMAGED = "the file is damaged, write it again with h5py"
_LEAVE_OUT = ", or leave it out with columns=[...]"

_lock = threading.RLock()


@functools.cache
def _h5py() -> Any:
    """Import h5py, and register hooks for forks and for the exit.

    A read acquires `_lock` and then h5py's lock, so a fork must acquire both in this order. Python calls the
    newest hook first, so ours are registered after h5py's. If two threads register them twice, no harm is done.
    """
    h5py = require("h5py", "hdf5")
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    atexit.register(_end_reads)
    return h5py


def _end_reads() -> None:
    """Prevent further reads, and wait for the read in progress.

    The interpreter ends daemon threads. A thread ended inside HDF5 would keep h5py's own lock, and the exit would
    wait for this lock. So if the read does not end, the process exits at once. Its status is 1, since an exit hook
    cannot see the program's status, and 0 could report a failure as a success.
    """
    stop_reads()
    if _lock.acquire(timeout=_EXIT_WAITS_S):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the streams may be closed, or None
        print(
            f"feedline: a read of an HDF5 file had not ended {_EXIT_WAITS_S:.0f} s after the program's end, so "
            "the process exits with status 1, without other exit hooks; close feeds before the program ends",
            file=sys.stderr,
        )
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of a row: a dataset, or a field of a dataset's compound elements.

    Attributes:
      dataset: its path in the file, which begins with "/".
      fields: the names that lead to the field, outermost first; empty for a whole dataset.
      row: the `Leaf` of one row.
      rows, height: the number of rows, and how many of them are read at once.
      mapped: the elements of the dataset, if they are contiguous in the file and have a NumPy dtype; else None.
    """

    dataset: str
    fields: tuple[str, ...]
    row: Leaf
    rows: int
    height: int
    mapped: FileArray | None

    @property
    def path(self) -> str:
        return "/".join([self.dataset.strip("/"), *self.fields])

    def field_of(self, elements: Any) -> Any:
        """Return the leaf's field of `elements`, which belong to its dataset and are in memory or in the file."""
        return functools.reduce(lambda inner, name: inner[name], self.fields, elements)


def open_hdf5(file: File, options: OpenOptions) -> Grouped:
    """Describe the datasets of a file: mapped, in groups of rows, or, if any of them has bytes, row by row."""
    tree: dict[str, Any] = {}
    for leaf in _leaves_of_file(file, options):
        *outer, last = leaf.path.split("/")
        functools.reduce(lambda inner, part: inner.setdefault(part, {}), outer, tree)[last] = leaf
    leaves: list[_Leaf] = jax.tree.leaves(tree)

    def read(number: int, group: int) -> Column:
        leaf = leaves[number]
        rows = slice(group * leaf.height, min((group + 1) * leaf.height, leaf.rows))
        return Column(_used(file, lambda opened: _read_from(opened, leaf, rows)))

    def read_rows(numbers: Sequence[int], rows: Indices) -> list[list[Any]]:
        unique, places = np.unique(rows, return_inverse=True)
        wanted: Any = unique
        if len(unique) and unique[-1] - unique[0] == len(unique) - 1:
            wanted = slice(int(unique[0]), int(unique[-1]) + 1)  # faster than a list of rows
        chosen = [leaves[number] for number in numbers]
        found = _used(file, lambda opened: [_read_from(opened, leaf, wanted) for leaf in chosen])
        return [
            list(map(bytes, values[places])) if isinstance(leaf.row, str) else list(values[places])
            for leaf, values in zip(chosen, found, strict=True)  # [places] copies, since decoders may change rows
        ]

    spec = jax.tree.map(lambda leaf: leaf.row, tree)
    if any(isinstance(leaf.row, str) for leaf in leaves):
        return by_rows(spec, leaves[0].rows, read_rows)
    is_mapped = not file.in_store and all(leaf.mapped is not None for leaf in leaves)
    return Grouped(
        spec,
        [even_groups(leaf.rows, leaf.height, file.name) for leaf in leaves],
        read,
        arrays=(lambda: [jax.tree.map(lambda leaf: leaf.field_of(leaf.mapped), tree)]) if is_mapped else None,
    )


_OPTIONS = frozenset({"columns", "cache_bytes"})
FORMAT = Format("hdf5", (".h5", ".hdf5"), _OPTIONS, extra="hdf5", open=open_hdf5, files=fetched_files)


def _used(file: File, use: Callable[[Any], T]) -> T:
    """Call `use` with the `h5py.File` while no other thread uses HDF5, and return the result."""
    h5py = _h5py()

    def used(path: str) -> T:
        with _lock:
            check_may_read()
            for other in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE):
                is_written = other.get_intent() != h5py.h5f.ACC_RDONLY  # tested first, since `realpath` is slow
                if is_written and os.path.realpath(os.fsdecode(other.name)) == os.path.realpath(path):
                    # HDF5 would read through the writer's handle, and return data that may not be on disk yet
                    raise ValueError("it is already open for writing in this process")
            with h5py.File(path, "r", locking="best-effort") as opened:
                return use(opened)

    return file.with_path(used)


def _read_from(opened: Any, leaf: _Leaf, rows: Any) -> Array:
    try:
        return np.ascontiguousarray(leaf.field_of(opened[leaf.dataset][rows]))
    except (OSError, RuntimeError, KeyError) as error:  # HDF5 raises these for damaged files
        raise ValueError(f"{leaf.dataset}: {error}; {_DAMAGED}") from error


# --- what a file has ---


class _RefusedError(ValueError):
    """A dataset is valid, but cannot be read as rows. The message names it, and says what to change."""


def _leaves_of_file(file: File, options: OpenOptions) -> list[_Leaf]:
    """Return the chosen leaves of a file. Raises ValueError if their numbers of rows differ."""
    try:
        leaves, names = _used(file, lambda opened: _chosen(opened, file, options))
    except (FeedError, _RefusedError):
        raise
    except Exception as error:  # h5py raises many types for damaged files
        raise ValueError(
            f"{file.name} cannot be read as an HDF5 file: {str(error) or type(error).__name__}. It must not be "
            "open for writing: close it in the program that writes it. If this program was killed, run h5clear -s "
            "(Debian: hdf5-tools) and check the data. If it is truncated, or in another format, write it again"
        ) from error
    options.chosen(names, file.name)
    check_same_rows({leaf.path: leaf.rows for leaf in leaves}, file.name)
    return leaves


def _chosen(opened: Any, file: File, options: OpenOptions) -> tuple[list[_Leaf], list[str]]:
    """The chosen leaves, and the names that `columns` may contain.

    HDF5 visits each group once, and follows neither soft links nor links to other files.
    """
    links: list[tuple[str, Any]] = []
    opened.visititems_links(lambda path, link: links.append((path, link)))
    prefixes = {column: f"{column.strip('/')}/" for column in options.columns or ()}
    leaves: dict[str, _Leaf] = {}
    names = [name for name in opened if name not in prefixes]
    for column, prefix in (prefixes or {"": ""}).items():
        paths = [(path, link) for path, link in links if f"{path}/".startswith(prefix)]
        found = [leaf for path, link in paths for leaf in _leaves_at(opened, path, link, file)]
        leaves |= {leaf.path: leaf for leaf in found}
        if found:
            names.append(column)
    return list(leaves.values()), names


def _leaves_at(opened: Any, path: str, link: Any, file: File) -> list[_Leaf]:
    """The leaf of the dataset at a path, or a leaf for each of its fields. A group or a scalar has no leaves."""
    h5py, where = _h5py(), f"{file.name}: {path}"
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        raise _RefusedError(
            f"{where}: links are not followed, and this one leads to {link.path} of "
            f"{getattr(link, 'filename', 'this file')}; choose its target with columns=[...], or open that file"
        )
    dataset = opened[path]
    if not isinstance(dataset, h5py.Dataset) or not dataset.shape:
        return []
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(number) for number in range(created.get_nfilters())]
    lacking = [name or number for number, *_, name in filters if not h5py.h5z.filter_avail(number)]
    if created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count() or lacking:
        raise _RefusedError(
            f"{where}: its data must lie in the file itself, with filters that this h5py has, but it is virtual, "
            f"in external files, or has the filters {lacking}; open the files that have the data, install "
            "hdf5plugin and import it first, or write it again: new.create_dataset(name, "
            "data=old[name][:])"
        )
    try:
        elements = dataset.dtype
    except TypeError as error:
        raise _RefusedError(
            f"{where}: its elements must be numbers of a dtype that NumPy has: {error}{_LEAVE_OUT}"
        ) from error
    rows, chunk = dataset.shape[0], dataset.chunks
    row_bytes = math.prod(dataset.shape[1:]) * elements.itemsize
    height = chunk[0] if chunk else max(1, _GROUP_BYTES // max(1, row_bytes), rows // _MAX_GROUPS)
    needed = max(min(height, rows) * row_bytes, math.prod(chunk or ()) * elements.itemsize)
    check_memory(file.name, f"rows of {dataset.name} that are read at once", needed)
    if chunk:
        _check_chunks(dataset, {number for number, *_ in filters}, file.size)
    mapped, offset = None, dataset.id.get_offset()  # offset None: it is not contiguous, or was never written
    is_native = not elements.hasobject and h5py.h5t.py_create(elements, logical=True) == dataset.id.get_type()
    if offset is not None and is_native:
        mapped = FileArray.of(file, elements, dataset.shape, offset)  # ValueError: it would end beyond the file

    def leaves(dtype: np.dtype[Any], *fields: str) -> list[_Leaf]:
        if dtype.names is not None:
            return [leaf for name in dtype.names for leaf in leaves(dtype[name], *fields, name)]
        row = _row_of(dtype, dataset.shape[1:], where)
        return [_Leaf(dataset.name, fields, row, rows, height, mapped)]

    return leaves(elements)


def _check_chunks(dataset: Any, filters: set[int], file_bytes: int) -> None:
    """Raise ValueError for chunks outside of the file, or so short that HDF5 would read beyond them."""
    h5z, least = _h5py().h5z, 1
    if filters <= {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}:  # these filters keep the size
        least = math.prod(dataset.chunks) * dataset.id.get_type().get_size()

    def invalid(chunk: Any) -> bool | None:  # None continues the iteration
        return None if least <= chunk.size and 0 <= chunk.byte_offset <= file_bytes - chunk.size else True

    if dataset.id.chunk_iter(invalid):
        raise ValueError(
            f"each chunk of {dataset.name} must have {least} bytes or more, and lie within the {file_bytes} bytes "
            f"of the file, and one does not; {_DAMAGED}"
        )


def _row_of(dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Leaf:
    """The leaf for rows of this dtype and shape: numbers, or a single value of bytes or text."""
    h5py, number = _h5py(), dtype.base
    is_bytes = h5py.check_vlen_dtype(dtype) in (np.uint8, np.int8) or h5py.check_string_dtype(dtype) is not None
    if (is_bytes or (dtype.kind == "V" and dtype.subdtype is None)) and not shape:  # "V": opaque
        return "bytes"
    if number.kind not in "mMOSV" and is_numeric(number):
        return jax.ShapeDtypeStruct((*shape, *dtype.shape), np.dtype(number.str))  # without h5py's metadata
    found = "references" if h5py.check_ref_dtype(number) is not None else f"{number}{list(shape)}"
    raise _RefusedError(
        f"{where}: a row must have numbers or booleans of a dtype that JAX has, or one value of bytes or text, "
        f"and has {found}; encode these values as numbers (dates with array.view(numpy.int64)){_LEAVE_OUT}"
    )
