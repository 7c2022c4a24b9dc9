"""HDF5 files, read by h5py: numbers as columns, bytes and text as encoded rows.

HDF5 serves one thread of a process at a time; worker processes read in parallel. A file is opened for each read: a
process that has it open could not write it, and each worker process needs its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.opening import opening
from feedline._src.formats import extras
from feedline._src.formats.grouped_file import Group, GroupedFile, TableFile, memory_bytes
from feedline._src.formats.npy import MappedFile
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.rows import digests
from feedline._src.rows.shards import EvenLengths, Indices
from feedline._src.rows.spec import is_numeric
from feedline._src.runtime.ending import check_may_read, stop_reads

FORMAT = Format("hdf5", (".h5", ".hdf5"), takes=frozenset({"columns", "cache_bytes"}), extra="hdf5")

Array = npt.NDArray[Any]
_MOST_LINKS = 32
_MOST_IN_MEMORY_BYTES = 1 << 26
"""Beside contiguous datasets, others such as compressed labels are read into memory, up to this size in total."""
_GROUP_BYTES = 1 << 16
"""Size of a group of rows of a dataset without chunks."""

_EXIT_WAITS_S = 1.0
"""For the read in progress. With what closing feeds takes, the exit stays below two seconds."""

_lock = threading.RLock()


@functools.cache
def _h5py() -> Any:
    """The library h5py, with hooks of forks and of the exit.

    The newest hook is called first. These are newer than h5py's: a thread that reads takes `_lock` and then h5py's
    lock, so a fork must take them in this order, too. Two threads may register them twice, which is harmless.
    """
    h5py = extras.require("h5py", "hdf5")
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


class _RefusedError(ValueError):
    """A dataset is valid, but cannot be read as rows. The message says what to change."""


class Leaf(NamedTuple):
    """A leaf of a row: a dataset, or a field of its compound elements.

    Attributes:
      dataset: its name in the file.
      fields: the names that lead to the field, outermost first.
      row: shape and dtype of one row; dtype object for bytes and text.
      kind: "bytes" or "bytes of int32", or for numbers dtype and shape of a row.
      shape, elements: of the dataset, and the dtype of its elements.
      height: how many rows are read at once.
      start: for a contiguous dataset that NumPy can use as it lies in the file, its first byte; else None.
    """

    dataset: str
    fields: tuple[str, ...]
    row: jax.ShapeDtypeStruct
    kind: str
    shape: tuple[int, ...]
    elements: np.dtype[Any]
    height: int
    start: int | None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The size of the dataset in memory."""
        return math.prod(self.shape) * self.elements.itemsize

    @property
    def is_bytes(self) -> bool:
        """Whether a row is bytes or text."""
        return bool(self.row.dtype == np.object_)

    def of(self, elements: Array) -> Array:
        """The leaf of some elements of its dataset."""
        for name in self.fields:
            elements = elements[name]
        return elements


# --- the ways to read a file ---


def is_mapped(path: Path, options: OpenOptions) -> bool:
    """Whether the rows of a file can be used where they lie. Small datasets beside them are read into memory."""
    return _is_mapped(_leaves(_tree_of(path, options)))


def mapped(path: Path, options: OpenOptions) -> list[Any]:
    """The rows of a file that `is_mapped`, as a tree of arrays, which are views of the mapped file.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    with opening(path) as file:
        memory = MappedFile(file).bytes
    tree = _tree_of(path, options)
    _check_numbers(_leaves(tree), path)

    def array(leaf: Leaf) -> Array:
        if leaf.start is None:
            return _read(path, leaf, slice(0, leaf.rows))
        return leaf.of(np.ndarray(leaf.shape, leaf.elements, memory, leaf.start))

    try:
        return [jax.tree.map(array, tree, is_leaf=_is_leaf)]
    except ValueError as error:
        raise ValueError(f"{path} cannot be mapped: {error}") from error


def grouped(path: Path, options: OpenOptions) -> GroupedFile:
    """The rows of any file without bytes and text, in groups of the rows of a chunk.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    tree = _tree_of(path, options)
    leaves = _leaves(tree)
    _check_numbers(leaves, path)

    def read(leaf: int, group: int) -> Group:
        start = group * leaves[leaf].height
        return Group(_read(path, leaves[leaf], slice(start, min(start + leaves[leaf].height, leaves[leaf].rows))))

    return GroupedFile(
        jax.tree.map(lambda leaf: leaf.row, tree, is_leaf=_is_leaf),
        [EvenLengths(leaf.rows, leaf.height) for leaf in leaves],
        read,
        lambda _: digests.of_file(path),
    )


def table(path: Path, options: OpenOptions) -> TableFile | None:
    """The rows of a file with bytes or text; None if the chosen datasets have none.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    tree = _tree_of(path, options)
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    leaves = {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in named}
    if not any(leaf.is_bytes for leaf in leaves.values()):
        return None
    kinds = {name: leaf.kind for name, leaf in leaves.items()}
    rows = next(iter(leaves.values())).rows
    return TableFile(kinds, [rows], lambda _: _Rows(path, leaves), reads="rows", form="hdf5")


class _Rows(NamedTuple):
    """All rows of a file with bytes or text. Each call reads those that it is asked for."""

    path: Path
    leaves: Mapping[str, Leaf]

    @property
    def nbytes(self) -> int:
        """0: nothing is in memory."""
        return 0

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return next(iter(self.leaves.values())).rows

    def nulls(self, rows: Indices) -> None:
        """None: HDF5 has no nulls."""

    def take(self, rows: Indices) -> list[dict[str, Any]]:
        """These rows: values of bytes, and numbers as NumPy scalars or arrays, by name."""
        unique, places = np.unique(rows, return_inverse=True)
        asked: Any = unique
        if len(unique) and unique[-1] - unique[0] == len(unique) - 1:
            asked = slice(int(unique[0]), int(unique[-1]) + 1)  # faster than a list of rows
        with _opened(self.path) as file:
            read = {name: _read_from(file, leaf, asked) for name, leaf in self.leaves.items()}
        columns = {
            name: [_bytes_of(value) if self.leaves[name].is_bytes else value for value in found[places]]
            for name, found in read.items()  # [places] copies: a decoder may change its row in place
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _bytes_of(value: Any) -> bytes:
    return bytes(value.tobytes() if isinstance(value, np.ndarray | np.void) else value)


def _read(path: Path, leaf: Leaf, rows: slice) -> Array:
    with _opened(path) as file:
        return np.ascontiguousarray(_read_from(file, leaf, rows))


def _read_from(file: Any, leaf: Leaf, rows: Any) -> Array:
    try:
        return leaf.of(file[leaf.dataset][rows])
    except (OSError, RuntimeError, KeyError) as error:  # of HDF5, for damage
        raise ValueError(f"{leaf.dataset}: {error}; the file is damaged, write it again with h5py") from error


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _leaves(tree: Any) -> list[Leaf]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


def _is_mapped(leaves: Sequence[Leaf]) -> bool:
    others = {leaf.dataset: leaf.nbytes for leaf in leaves if leaf.start is None}
    return (
        not any(leaf.is_bytes for leaf in leaves)
        and any(leaf.start is not None for leaf in leaves)
        and sum(others.values()) <= _MOST_IN_MEMORY_BYTES
    )


def _check_numbers(leaves: Sequence[Leaf], path: Path) -> None:
    found = next((leaf for leaf in leaves if leaf.is_bytes), None)
    if found is not None:
        raise ValueError(
            f"files must agree in datasets and their types; {found.dataset} of {path} has bytes or text, and the "
            "first file has none; choose columns=[...] that they share, or write them again"
        )


# --- what a file has ---


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The `h5py.File`, for the length of a `with` block, in which no other thread uses HDF5."""
    h5py = _h5py()
    with _lock:
        check_may_read()
        with h5py.File(path, "r", locking="best-effort") as file:
            if file.mode != "r":  # HDF5 shares one state of a file, of which not all may lie on disk yet
                raise ValueError("it is already open for writing in this process")
            yield file


def _tree_of(path: Path, options: OpenOptions) -> dict[str, Any]:
    """The chosen leaves of a file: nested dicts of `Leaf`, as groups and compound types nest.

    Raises:
      FileNotFoundError, OSError: there is none, or the disk failed.
      ValueError: a folder, another format, damaged, being written, or no rows of one table.
    """
    with opening(path):
        pass  # h5py's errors do not say what to do
    refused: dict[str, str] = {}
    tree: dict[str, Any] = {}
    try:
        with _opened(path) as file:
            paths = [name for name in options.columns or () if "/" in name and _is_there(file, name)]
            for name in options.chosen([*file, *paths], str(path)) if len(file) else []:
                try:
                    found = list(_found(file, tuple(part for part in name.split("/") if part), path, ()))
                except _RefusedError as error:
                    refused[name] = str(error)
                    continue
                if not found and options.columns is not None:
                    refused[name] = "no rows: a scalar or an empty group"
                for names, leaf in found:
                    _insert(tree, names, leaf)
    except Exception as error:  # of many types, for damaged files
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        message = f"{path} cannot be read as an HDF5 file: {str(error) or type(error).__name__}. "
        if "unable to lock" in message or "already open for" in message:
            raise ValueError(
                f"{message}A file must not be open for writing: close it in the program that writes it, or, if "
                "that was killed, run h5clear -s (Debian: hdf5-tools) and check the data"
            ) from error
        raise ValueError(f"{message}It may be truncated or another format; write it again with h5py") from error
    _check_lengths(tree, refused, path)
    return tree


def _insert(tree: dict[str, Any], names: tuple[str, ...], leaf: Leaf) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf


def _found(
    group: Any, names: tuple[str, ...], path: Path, above: tuple[Any, ...]
) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """The leaves of a dataset or a group, with their names. A scalar has none."""
    h5py = _h5py()
    name = "/".join(names)
    _check_same_file(group, name)
    link = group.get(name, getlink=True)
    if isinstance(link, h5py.SoftLink) and group.get(name) is None:
        raise _RefusedError(f"a link to {link.path}, which does not exist; leave it out with columns=[...]")
    node = group[name]
    if isinstance(node, h5py.Group):
        at = h5py.h5o.get_info(node.id).addr
        if at in above:
            raise _RefusedError("a link to a group that it lies in; leave it out with columns=[...]")
        for child in node:
            for inner, leaf in _found(node, (child,), path, (*above, at)):
                yield (*names, *inner), leaf
    elif isinstance(node, h5py.Dataset) and node.shape:
        for leaf in _leaves_of(node, path):
            yield (*names, *leaf.fields), leaf


def _check_same_file(group: Any, name: str) -> None:
    """Refuse a path into another file before HDF5 opens that.

    Raises:
      _RefusedError: a link on the way names another file, or there are too many links.
    """
    h5py = _h5py()
    paths = [(group, name)]
    for here, path in paths:
        if len(paths) > _MOST_LINKS:
            raise _RefusedError("too many links that lead to each other; leave it out with columns=[...]")
        at = here.file["/"] if path.startswith("/") else here
        parts = [part for part in path.split("/") if part]
        for i in range(len(parts)):
            link = at.get("/".join(parts[: i + 1]), getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise _RefusedError(f"a link to the file {link.filename}; open that file itself")
            if isinstance(link, h5py.SoftLink):
                before = [] if link.path[:1] == "/" else parts[:i]
                paths.append((at if before else at.file["/"], "/".join([*before, link.path, *parts[i + 1 :]])))
                break  # the rest lies behind this link


def _is_there(file: Any, name: str) -> bool:
    """Whether a file has this dataset or group, or a link that is refused."""
    try:
        _check_same_file(file, name)
    except _RefusedError:
        return True
    return name in file


def _leaves_of(dataset: Any, path: Path) -> Iterator[Leaf]:
    """The leaves of an `h5py.Dataset`.

    Raises:
      _RefusedError: it cannot be read as rows.
      ValueError: it is damaged.
    """
    h5py = _h5py()
    created = dataset.id.get_create_plist()
    if created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count():
        raise _RefusedError(
            "its data must lie in the file itself, and it is virtual or in external files; open those files "
            "themselves, or write it again: new[name] = old[name][:]"
        )
    for number, *_, name in map(created.get_filter, range(created.get_nfilters())):
        if not h5py.h5z.filter_avail(number):
            raise _RefusedError(
                f"its chunks have the filter {(name or b'').decode(errors='replace') or number}, which this h5py "
                "does not have; install hdf5plugin and import it before, or write it again: "
                "new.create_dataset(name, data=old[name][:], compression='gzip')"
            )
    try:
        elements = dataset.dtype
    except TypeError as error:
        raise _RefusedError(f"its elements must be numbers that NumPy has, bytes or text: {error}") from error
    rows, item_bytes = dataset.shape[0], elements.itemsize
    row_bytes = math.prod(dataset.shape[1:]) * item_bytes
    chunk = dataset.chunks
    height = chunk[0] if chunk else max(1, _GROUP_BYTES // max(1, row_bytes))
    _check_memory(max(min(height, rows) * row_bytes, math.prod(chunk or ()) * item_bytes), dataset.name, path)
    if chunk:
        _check_chunks(dataset, created, path)
    start = None
    is_written = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED and dataset.id.get_storage_size()
    if created.get_layout() == h5py.h5d.CONTIGUOUS and is_written:
        start, size = dataset.id.get_offset(), path.stat().st_size
        if start + rows * row_bytes > size:
            raise ValueError(f"{path}: dataset {dataset.name} leads out of the file, which has {size} bytes")
        if elements.hasobject or h5py.h5t.py_create(elements, logical=True) != dataset.id.get_type():
            start = None  # h5py must convert them
    for names, shape, dtype, kind in _fields_of(elements):
        if dtype == np.object_ and len(dataset.shape) > 1:
            raise _RefusedError(
                f"a row must have one value of bytes or text, and has {list(dataset.shape[1:])} of them"
            )
        row = jax.ShapeDtypeStruct((*dataset.shape[1:], *shape), dtype)
        kind = kind or f"{dtype}{list(row.shape)}"
        yield Leaf(dataset.name, names, row, kind, dataset.shape, elements, height, start)


def _fields_of(
    dtype: np.dtype[Any], names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], np.dtype[Any], str]]:
    """The leaves of an element: names, shape, dtype, and for bytes and text what they are.

    Raises:
      _RefusedError: it holds something else than numbers, booleans, bytes and text.
    """
    h5py = _h5py()
    if dtype.names is not None:
        for name in dtype.names:
            yield from _fields_of(dtype[name], (*names, name))
        return
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        yield names, shape, _number(base), ""
        return
    values = h5py.check_vlen_dtype(dtype)
    if isinstance(values, np.dtype):
        values = _number(values)
        if not values.isnative:  # h5py gives their bytes as they are stored, with the other dtype
            raise _RefusedError(f"numbers of variable length must be {values.newbyteorder('=')}, not {values.str}")
        yield names, (), np.dtype(object), "bytes" if values.itemsize == 1 else f"bytes of {values}"
    elif h5py.check_string_dtype(dtype) is not None or dtype.kind == "V":
        yield names, (), np.dtype(object), "bytes"
    else:
        yield names, (), _number(dtype), ""


def _number(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype, without h5py's notes in it. _RefusedError: it is not one of numbers or booleans."""
    h5py = _h5py()
    if dtype.kind in "mM":
        raise _RefusedError("dates and times must be numbers; write array.view(numpy.int64)")
    if dtype.kind not in "OSV" and is_numeric(dtype):
        return np.dtype(dtype.str)
    found = "references" if h5py.check_ref_dtype(dtype) is not None else str(dtype)
    raise _RefusedError(
        f"its elements must be numbers or booleans that JAX has, bytes or text, and are {found}; encode them as "
        "numbers, or leave the dataset out with columns=[...]"
    )


def _check_chunks(dataset: Any, created: Any, path: Path) -> None:
    """Refuse chunks outside of the file, and those that are too small: HDF5 would read beyond their bytes."""
    h5z = extras.require("h5py.h5z", "hdf5")
    filters = [created.get_filter(i)[0] for i in range(created.get_nfilters())]
    least = 1
    if set(filters) <= {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}:
        least = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    found: list[tuple[int, int]] = []
    dataset.id.chunk_iter(lambda chunk: found.append((chunk.byte_offset, chunk.size)))
    offset, size = np.array(found, np.int64).reshape(-1, 2).T
    file_bytes = path.stat().st_size
    if not ((offset >= 0) & (size >= least) & (size <= file_bytes) & (offset <= file_bytes - size)).all():
        raise ValueError(
            f"{path}: chunks of {dataset.name} must have {least} bytes or more of the {file_bytes} of the file, "
            "and one has not; the file is damaged, write it again"
        )


def _check_memory(needed: int, name: str, path: Path) -> None:
    has = memory_bytes()
    if needed > has:
        raise ValueError(
            f"{path}: rows of {name} that are read at once must fit into memory, and take {needed} bytes of the "
            f"{has} there are; write it again in smaller chunks if it is not damaged"
        )


def _check_lengths(tree: dict[str, Any], refused: dict[str, str], path: Path) -> None:
    """Refuse leaves that are no rows of one table; the error says which would be."""
    by_name = {name: {leaf.rows for leaf in _leaves(node)} for name, node in tree.items()}
    lengths = set[int]().union(*by_name.values())
    if len(lengths) == 1 and not refused:
        return
    if not lengths and not refused:
        raise ValueError(f"an HDF5 file must have at least one dataset with rows, {path} has none")
    found = refused | {name: f"{' or '.join(map(str, sorted(rows)))} rows" for name, rows in by_name.items()}
    listed = "; ".join(f"{name}: {found[name]}" for name in sorted(found))
    if not lengths:
        raise ValueError(f"no dataset of {path} can be read as rows: {listed}")
    largest = max(_leaves(tree), key=lambda leaf: leaf.nbytes).rows
    fitting = [name for name in sorted(by_name) if by_name[name] == {largest}]
    fix = f"choose those that belong together: columns={fitting}"
    if not fitting:
        fix = "choose datasets inside of groups: columns=['group/name', ...]"
    raise ValueError(f"all datasets of an HDF5 file must have the same number of rows, {path} has {listed}; {fix}")
