"""The datasets of an HDF5 file as a tree of leaves."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from feedline._src.sources.formats import extras
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import opening
from feedline._src.sources.hdf5.datasets import Dataset, dataset_of
from feedline._src.sources.hdf5.elements import REFERENCE, Field, RefusedError, fields_of
from feedline._src.stores.remote_file import RemoteFile
from feedline._src.stores.remote_object import RemoteObject

SUFFIXES = (".h5", ".hdf5")
_MOST_LINKS = 32
_MOST_IN_MEMORY_BYTES = 1 << 26
"""Of compressed datasets beside others that are not, such as labels: so much is read into memory."""


class Leaf(NamedTuple):
    """A leaf of a row: a field of the elements of a dataset."""

    dataset: Dataset
    field: Field

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Of one row."""
        return jax.ShapeDtypeStruct((*self.dataset.shape[1:], *self.field.shape), self.field.dtype)


class File(NamedTuple):
    """The leaves of a file.

    Attributes:
      leaves: nested dicts of `Leaf`, as groups and compound types nest. All have the same number of rows.
      base: what HDF5's addresses in the file are relative to, in bytes.
    """

    leaves: dict[str, Any]
    base: int

    @property
    def flat(self) -> list[Leaf]:
        """The leaves, in the order in which JAX flattens the tree."""
        return jax.tree.leaves(self.leaves, is_leaf=lambda node: isinstance(node, Leaf))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.flat[0].dataset.shape[0]

    @property
    def is_mapped(self) -> bool:
        """Whether rows are used where they lie in the file. Small datasets beside them are read into memory."""
        others = [leaf.dataset for leaf in self.flat if not leaf.dataset.has_plain_rows]
        in_memory = sum(dataset.row_bytes * dataset.shape[0] for dataset in others)
        return len(others) < len(self.flat) and in_memory <= _MOST_IN_MEMORY_BYTES

    @property
    def has_bytes(self) -> bool:
        """Whether some leaf holds bytes or text."""
        return any(leaf.field.bytes is not None for leaf in self.flat)


@contextlib.contextmanager
def opened(path: Path | RemoteObject) -> Iterator[Any]:
    """The `h5py.File`, for the length of a `with` block.

    Raises:
      FileNotFoundError, OSError: there is none, or the disk failed.
      ValueError: a folder, another format, damaged, or being written; also for errors of h5py inside the block.
      FeedError: the store failed.
    """
    h5py = extras.require("h5py", "hdf5")
    remote = None if isinstance(path, Path) else RemoteFile(path, exact=False)
    if isinstance(path, Path):
        with opening(path):
            pass  # h5py's errors do not say what to do
    try:
        with _file(h5py, remote or str(path), locking=None if remote else "best-effort") as file:
            if file.mode != "r":  # HDF5 shares one state of a file, of which not all may lie on disk yet
                raise ValueError("it is already open for writing in this process")
            yield file
    except RefusedError:
        raise
    except Exception as error:  # of many types, for damaged files
        if remote is not None and remote.error is not None:
            raise remote.error from None
        message = f"{path} cannot be read as an HDF5 file: {str(error) or type(error).__name__}. "
        if "unable to lock" in message or "already open for" in message:
            raise ValueError(
                f"{message}A file must not be open for writing: close it in the program that writes it, or, if "
                "that was killed, run h5clear -s (Debian: hdf5-tools) and check the data"
            ) from error
        raise ValueError(f"{message}It may be truncated or another format; write it again with h5py") from error


def _file(h5py: Any, file: RemoteFile | str, locking: str | None) -> Any:
    try:
        return h5py.File(file, "r", locking=locking)
    except BaseException as error:
        # HDF5 would end a process by SIGSEGV that exits while the error, and so a variable of h5py, is there
        traceback.clear_frames(error.__traceback__)
        raise


def read_file(path: Path | RemoteObject, options: OpenOptions) -> File:
    """The chosen leaves of a file. Of an object, the blocks that hold metadata are fetched one after the other.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    refused: dict[str, str] = {}
    tree: dict[str, Any] = {}
    with opened(path) as file:
        size = path.stat().st_size if isinstance(path, Path) else path.size
        paths = [name for name in options.columns or () if "/" in name and _is_there(file, name)]
        for name in options.chosen([*file, *paths], str(path)) if len(file) else []:
            parts = tuple(part for part in name.split("/") if part)
            try:
                found = list(_leaves(file, parts, size, ()))
            except RefusedError as error:
                refused[name] = str(error)
                continue
            if not found and options.columns is not None:
                refused[name] = "no rows: a scalar or an empty group"
            for names, leaf in found:
                _insert(tree, names, leaf)
        found_file = File(tree, file.userblock_size)
        wide = file.id.get_create_plist().get_sizes() == (8, 8)
    if found_file.has_bytes and not wide:
        raise ValueError(f"{path}: addresses must have 8 bytes, and have others; write it again with h5py")
    _check_lengths(found_file, refused, path)
    return found_file


def _insert(tree: dict[str, Any], names: tuple[str, ...], leaf: Leaf) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf


def _leaves(
    group: Any, names: tuple[str, ...], size_bytes: int, above: tuple[Any, ...]
) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """The leaves of a dataset or a group, with their names. A scalar has none."""
    h5py = extras.require("h5py", "hdf5")
    name = "/".join(names)
    _check_same_file(group, name)
    link = group.get(name, getlink=True)
    if isinstance(link, h5py.SoftLink) and group.get(name) is None:
        raise RefusedError(f"a link to {link.path}, which does not exist; leave it out with columns=[...]")
    node = group[name]
    if isinstance(node, h5py.Group):
        at = h5py.h5o.get_info(node.id).addr
        if at in above:
            raise RefusedError("a link to a group that it lies in; leave it out with columns=[...]")
        for child in node:
            for inner, leaf in _leaves(node, (child,), size_bytes, (*above, at)):
                yield (*names, *inner), leaf
    elif isinstance(node, h5py.Dataset) and node.shape:
        fields = fields_of(node.id.get_type())
        dataset = dataset_of(node, size_bytes)
        for field in fields:
            _check_bytes(dataset, field)
            yield (*names, *field.names), Leaf(dataset, field)


def _check_same_file(group: Any, name: str) -> None:
    """Refuse a path into another file before HDF5 opens that: its chunks would be read from this file.

    Raises:
      RefusedError: a link on the way names another file, or there are too many links.
    """
    h5py = extras.require("h5py", "hdf5")
    paths = [(group, name)]
    for here, path in paths:
        if len(paths) > _MOST_LINKS:
            raise RefusedError("too many links that lead to each other; leave it out with columns=[...]")
        at = here.file["/"] if path.startswith("/") else here
        parts = [part for part in path.split("/") if part]
        for i in range(len(parts)):
            link = at.get("/".join(parts[: i + 1]), getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise RefusedError(f"a link to the file {link.filename}; open that file itself")
            if isinstance(link, h5py.SoftLink):
                before = [] if link.path[:1] == "/" else parts[:i]
                paths.append((at if before else at.file["/"], "/".join([*before, link.path, *parts[i + 1 :]])))
                break  # the rest lies behind this link


def _is_there(file: Any, name: str) -> bool:
    """Whether a file has this dataset or group, or a link that is refused."""
    try:
        _check_same_file(file, name)
    except RefusedError:
        return True
    return name in file


def _check_bytes(dataset: Dataset, field: Field) -> None:
    if field.bytes is None:
        return
    if len(dataset.shape) > 1:
        raise RefusedError(
            f"a row must have one value of bytes or text, and has {list(dataset.shape[1:])} of them"
        )
    if field.bytes.stored == "heap" and field.shape != (REFERENCE.itemsize,):
        raise RefusedError("addresses must have 8 bytes, and have others; write it again with h5py")


def _check_lengths(file: File, refused: dict[str, str], path: Path | RemoteObject) -> None:
    """Refuse leaves that are no rows of one table; the error says which would be."""
    by_name: dict[str, set[int]] = {
        name: {leaf.dataset.shape[0] for leaf in jax.tree.leaves(node, is_leaf=lambda n: isinstance(n, Leaf))}
        for name, node in file.leaves.items()
    }
    lengths = set[int]().union(*by_name.values())
    if len(lengths) == 1 and not refused:
        return
    if not lengths and not refused:
        raise ValueError(f"an HDF5 file must have at least one dataset with rows, {path} has none")
    found = refused | {name: f"{' or '.join(map(str, sorted(rows)))} rows" for name, rows in by_name.items()}
    listed = "; ".join(f"{name}: {found[name]}" for name in sorted(found))
    if not lengths:
        raise ValueError(f"no dataset of {path} can be read as rows: {listed}")
    largest = max(file.flat, key=lambda leaf: leaf.dataset.row_bytes * leaf.dataset.shape[0]).dataset.shape[0]
    fitting = [name for name in sorted(by_name) if by_name[name] == {largest}]
    fix = f"choose those that belong together: columns={fitting}"
    if not fitting:
        fix = "choose datasets inside of groups: columns=['group/name', ...]"
    raise ValueError(f"all datasets of an HDF5 file must have the same number of rows, {path} has {listed}; {fix}")
