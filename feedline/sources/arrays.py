"""The columnar source: rows of arrays in memory or mapped from files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline.native.library import library
from feedline.options import Order
from feedline.order.compiled import Positions, epoch_order
from feedline.order.epoch import rows_at
from feedline.order.mixture import MixtureOrder
from feedline.placement.plan import Columns
from feedline.rows import digests
from feedline.rows.indexed import IndexedSource
from feedline.rows.shards import Indices
from feedline.rows.spec import is_numeric
from feedline.rows.values import as_array, is_in_memory, is_list
from feedline.sources.formats import arrow, files
from feedline.sources.formats.file_version import FileVersion
from feedline.sources.formats.mapped_file import MappedObject
from feedline.sources.formats.open_options import OpenOptions
from feedline.sources.remote_rows import RemoteRows
from feedline.sources.row_gather import RowGather, fill
from feedline.sources.windows import windows
from feedline.stores.client import Version
from feedline.stores.opening import RemoteObjects
from feedline.stores.options import Store
from feedline.stores.remote_file import SMALL_BYTES, open_object
from feedline.stores.urls import is_url

Array = npt.NDArray[Any]
_SAMPLED_ROWS = 1 << 10  # of a leaf, over all shards: on a cold disk each row is a seek
_MAX_SAMPLES_A_SHARD = 16
_CHECKS_A_READ = 4  # files, at some 5 µs each: checks must cost less than the copy


class ArraySource(IndexedSource):
    """A `RowSource` over a tree of arrays whose first axes agree; each leaf may come in shards.

    Reads are thread-safe: they only copy out of arrays. A pickled source holds paths, and opens the
    files again in the other process.

    Args:
      shards: each a path to a `.npy`, `.npz`, `.bin` or uncompressed Arrow file, or a tree of arrays and of
        paths to `.npy` files, all of one structure. The source has the rows of the first shard, then of the
        second, and so on.
      options: dtype, columns and windows (see `feedline.open_source`).

    Raises:
      ValueError: no rows, or leaves or shards that do not fit together.
      TypeError: a leaf is neither an array nor a path, or its dtype is not numeric.

    Example:
      >>> source = ArraySource([{"x": np.arange(6).reshape(3, 2)}])
      >>> out = {"x": np.empty((2, 2), np.int64)}
      >>> source.read(np.array([2, 0]), out)
      >>> out["x"].tolist()
      [[4, 5], [0, 1]]
    """

    def __init__(self, shards: Sequence[Any], options: OpenOptions | None = None) -> None:
        self._given = list(shards)
        self._options = options or OpenOptions()
        leaves = jax.tree.leaves(self._given)
        self._paths = [os.fspath(leaf) for leaf in leaves if isinstance(leaf, str | os.PathLike)]
        self._opened = _Opened.of(self._paths, self._options)
        self._open()

    @classmethod
    def joined(cls, sources: Sequence[ArraySource], number: str) -> ArraySource:
        """One source with the rows of all of these, which have one spec: a dict. It does not pickle.

        None of them may lie in a store.

        Args:
          number: the key of a leaf more: the number of the source of each row.
        """
        source = cls.__new__(cls)
        versions = {path: version for each in sources for path, version in each._opened.versions.items()}
        source._opened, source._remote = _Opened(versions, None), None
        source._files_to_check = itertools.cycle(versions.items())
        parts: list[Any] = [
            tuple(itertools.chain(*leaves)) for leaves in zip(*(each._leaves for each in sources), strict=True)
        ]
        # no memory: all rows of a source lie at the same address
        numbers = tuple(np.broadcast_to(np.int32(i), (len(each),)) for i, each in enumerate(sources))
        form = jax.tree.structure(sources[0].spec)
        source._leaves = jax.tree.leaves(
            {**jax.tree.unflatten(form, parts), number: numbers}, is_leaf=lambda node: isinstance(node, tuple)
        )
        source._rows = sum(map(len, sources))
        source._gathers = [RowGather(leaf) for leaf in source._leaves]
        source.spec = {**sources[0].spec, number: jax.ShapeDtypeStruct((), np.int32)}
        return source

    def _open(self) -> None:
        trees, names = [], []
        for i, shard in enumerate(self._given):
            opened = _as_trees(shard, self._options, self._opened)
            trees += opened
            names += [os.fspath(shard) if isinstance(shard, str | os.PathLike) else f"shard {i}"] * len(opened)
        self._files_to_check = itertools.cycle(self._opened.versions.items())
        parts = [_checked_leaves(tree, name, trees[0], names[0]) for tree, name in zip(trees, names, strict=True)]
        self._leaves = list(zip(*parts, strict=True))
        self._rows = sum(len(part[0]) for part in parts)
        if self._rows == 0:
            raise ValueError(f"a source must have at least one row, got {_why_empty(self._options, names[0])}")
        self._gathers = [RowGather(leaf) for leaf in self._leaves]
        remote = self._opened.objects
        self._remote = None if remote is None else RemoteRows(self._leaves, remote)
        self.spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), trees[0])

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every shard: no path, so a moved data set stays the same."""
        self._check_files()
        samples = min(_MAX_SAMPLES_A_SHARD, max(1, _SAMPLED_ROWS // len(self._leaves[0])))
        parts = list(zip(*self._leaves, strict=True))
        if self._remote is not None:
            return {"kind": "arrays", "shards": self._remote.digests(parts, samples)}
        sampled = [[digests.of_array(part, samples) for part in shard] for shard in parts]
        return {"kind": "arrays", "shards": sampled}

    @property
    def picklable(self) -> bool:
        """Whether worker processes can open it again, because every leaf is a path."""
        return all(isinstance(leaf, str | os.PathLike) for leaf in jax.tree.leaves(self._given))

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          FeedError: a file was written to or truncated.
        """
        self._check_files()
        with self._present(range(len(self._leaves)), rows):
            for gather, target in zip(self._gathers, jax.tree_util.tree_leaves(out), strict=True):
                gather.read(rows, (slice(None),) * (target.ndim - 1), target)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype; errors as `read`."""
        self._check_files()
        with self._present([leaf], rows):
            self._gathers[leaf].read(rows, columns, out)

    def read_in_order(
        self,
        order: Order | MixtureOrder,
        epoch: int,
        positions: Positions,
        cuts: Sequence[tuple[int, Columns, Array]],
    ) -> Indices:
        """Call `read_leaf` for each (leaf, columns, out) of `cuts`, with the rows at some positions of an epoch.

        The C library does this in a single call, including the computation of the rows.

        Returns:
          int64[k]: the row at each position.
        """
        self._check_files()
        if self._remote is None and (compiled := library()) is not None:
            copies = [self._gathers[leaf].copy(len(positions), columns, out) for leaf, columns, out in cuts]
            made = [copy for copy in copies if copy is not None]
            if isinstance(order, MixtureOrder):
                struct = order.struct(epoch, positions)
            else:
                struct = epoch_order(order, len(self), epoch)
            if len(made) == len(copies) and struct is not None:
                return fill(compiled, struct, positions, made)
        if isinstance(order, MixtureOrder):
            rows = order.rows_at(epoch, positions)
        else:
            rows = rows_at(order, len(self), epoch, positions)
        with self._present([leaf for leaf, _, _ in cuts], rows):
            for leaf, columns, out in cuts:
                self._gathers[leaf].read(rows, columns, out)
        return rows

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """As of a `ToldSource`, for arrays in a store; None for others."""
        return None if self._remote is None else self._remote.fetch_ahead

    def close(self) -> None:
        """Give up what is being fetched. A mapped file is unmapped with the last array that refers to it."""
        if self._opened.objects is not None:
            self._opened.objects.close()

    def _present(self, leaves: Sequence[int], rows: Indices) -> contextlib.AbstractContextManager[None]:
        """Within the `with` block, these rows of these leaves can be read."""
        return contextlib.nullcontext() if self._remote is None else self._remote.present(leaves, rows)

    def _check_files(self) -> None:
        """Refuse files that were written to. Each call checks only the next few of many files, to stay cheap."""
        for path, version in itertools.islice(
            self._files_to_check, min(_CHECKS_A_READ, len(self._opened.versions))
        ):
            version.check_open(path)

    def __reduce__(self) -> Any:
        remote = None if self._opened.objects is None else self._opened.objects.versions
        return _opened_again, (self._given, self._options, self._opened.versions, remote)


def _opened_again(
    given: list[Any], options: OpenOptions, versions: dict[str, FileVersion], remote: dict[str, Version] | None
) -> ArraySource:
    """A copy of a source that another process has open. FeedError if a file has changed since."""
    try:
        source = ArraySource(given, options)
    finally:  # also if it cannot be opened: a change explains that better
        for path, version in versions.items():
            version.check(path)
    for url, before in (remote or {}).items():
        assert source._opened.objects is not None
        before.check(source._opened.objects.by_url[url].version, url)
    return source


class _Opened(NamedTuple):
    """What is open: the versions of files by path, and the objects in stores."""

    versions: dict[str, FileVersion]
    objects: RemoteObjects | None

    @classmethod
    def of(cls, paths: Sequence[str], options: OpenOptions) -> _Opened:
        """The objects among some paths, and no file yet."""
        urls = [path for path in paths if is_url(path)]
        if not urls:
            return cls({}, None)
        objects = RemoteObjects(urls, options.store or Store())
        objects.samples([(url, 0, SMALL_BYTES) for url in objects.by_url])  # the headers, all at once
        return cls({}, objects)

    def load(self, path: str, dtype: Any = None) -> Any:
        """The arrays of a file or of an object."""
        if self.objects is None or not is_url(path):
            arrays, self.versions[os.path.abspath(path)] = files.load(Path(path), dtype)
            return arrays
        item = self.objects.by_url[path]
        return files.arrays_in(MappedObject(item.memory), open_object(item), path, dtype)


def _as_trees(shard: Any, options: OpenOptions, opened: _Opened) -> list[Any]:
    """A shard as trees of arrays whose rows follow each other: several only if a file has record batches."""
    if isinstance(shard, str | os.PathLike):
        path, name = Path(shard), os.fspath(shard)
        if path.suffix in arrow.SUFFIXES:
            if path.is_file():
                opened.versions[os.path.abspath(path)] = FileVersion.of(
                    path
                )  # before it is mapped, so that no change is missed
            return arrow.mapped(path, options)
        arrays = opened.load(name, options.dtype)
        shard = jax.tree_util.tree_map_with_path(functools.partial(_checked, name), options.named(arrays, name))
    tree = jax.tree_util.tree_map_with_path(functools.partial(_as_array, opened), shard, is_leaf=is_list)
    length = options.window
    if length is None:
        return [tree]
    return [jax.tree.map(lambda array: windows(array, length, options.stride or length), tree)]


def _as_array(opened: _Opened, path: Any, leaf: Any) -> Array:
    name = f"source{jax.tree_util.keystr(path)}"
    file = None
    if isinstance(leaf, str | os.PathLike):
        file = os.fspath(leaf)
        array: Any = opened.load(file)
        if not isinstance(array, np.ndarray):
            raise ValueError(
                f"{name}: a leaf is one array, and {leaf} holds several; pass the path itself as the source"
            )
    elif is_in_memory(leaf):
        array = as_array(name, leaf)
    elif is_list(leaf):
        raise TypeError(
            f"{name}: a list may mean rows or columns, so it is refused, got one of {len(leaf)} elements. For "
            "columns pass a tuple or a dict of arrays. For rows pass numpy.stack(rows); or an object with __len__ "
            "and __getitem__, as grain.MapDataset.source(rows) is; or, of files, a glob"
        )
    else:
        raise TypeError(
            f"{name}: a leaf must be an array or the path of a .npy file, got {type(leaf).__name__}; "
            "leaf[...] reads an array of HDF5, Zarr or netCDF into memory, numpy.asarray(leaf) a sequence of "
            "numbers. For rows that are read when they are asked for, pass the path of the .zarr, or an object "
            "with __len__ and __getitem__"
        )
    return _checked(file, path, array)


def _checked(file: str | None, path: Any, array: Array) -> Array:
    """The array of a leaf, after a check that it holds rows of numbers; `file` is None if it lies in memory."""
    name = f"source{jax.tree_util.keystr(path)}{f' of {file}' if file else ''}"
    if array.ndim == 0:
        raise ValueError(f"{name}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {array.dtype}; encode it as "
            "numbers first (rows of different lengths make dtype object: pad them)"
        )
    return np.asarray(array)


def _checked_leaves(tree: Any, name: str, first: Any, first_name: str) -> list[Array]:
    """The leaves of a shard, after checks of their lengths and that they have the form of the first shard."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("a source must have at least one array, got an empty tree")
    form: Any = jax.tree_util.tree_structure(tree)
    if form != jax.tree_util.tree_structure(first):
        raise ValueError(f"shards must have the same leaves; {name} has other ones than {first_name}")
    lengths = {f"source{jax.tree_util.keystr(path)}": len(leaf) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{leaf} has {length}" for leaf, length in lengths.items())
        raise ValueError(
            f"all leaves must have the same number of rows, but {listed} in {name}; cut them to one length"
        )
    for (path, leaf), reference in zip(leaves, jax.tree_util.tree_leaves(first), strict=True):
        if (leaf.dtype, leaf.shape[1:]) != (reference.dtype, reference.shape[1:]):
            raise ValueError(
                f"source{jax.tree_util.keystr(path)}: shards must agree in dtype and row shape; {name} has "
                f"{leaf.dtype}{list(leaf.shape[1:])}, {first_name} {reference.dtype}{list(reference.shape[1:])}"
            )
    return [leaf for _, leaf in leaves]


def _why_empty(options: OpenOptions, first: str) -> str:
    if options.window is None:
        return f"arrays of length 0 in {first}"
    return f"{first}, and no shard with {options.window} elements, the length of a window; choose a shorter one"
