"""Reads rows of arrays in memory, and of uncompressed arrays in files."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import FileArray
from feedline._src.native.gather import Reader, RowGather, rows_at_positions
from feedline._src.native.library import file_at, library
from feedline._src.native.spans import Spans, copy_values
from feedline._src.order.epoch import Positions, RowOrder
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards, offsets_by_label
from feedline._src.rows.source import Columns, Cut, Rows, Source, WillRead, indices_of
from feedline._src.rows.spec import first_difference, is_numeric
from feedline._src.rows.values import as_array, is_in_memory, is_list

if TYPE_CHECKING:
    from feedline._src.files.file import File
    from feedline._src.files.files import Files, Place
    from feedline._src.formats.registry import Format

Array = npt.NDArray[Any]
Read = Callable[["File", OpenOptions], list[Any]]
"""(file, options) → the trees of arrays in the file, like `Format.open` of a mapped format."""
T = TypeVar("T")
_SAMPLED_ROWS = 1 << 10  # of each leaf, over all shards; few, because on a cold disk each row costs a seek
_MAX_SAMPLES_A_SHARD = 16
CHECKS_A_READ = 4  # files checked in a read, at about 5 µs each: few, so that checks cost less than the copy


class ArraySource(Source):
    """A `Source` over a tree of arrays with the same number of rows. The rows may be divided into shards.

    Reads are thread-safe. A pickled source holds paths, and opens the files again in the other process.

    Local files are mapped. Files in a store are read through the cache. Once the cache holds all of them
    completely, they are mapped as well, until one is evicted.

    Args:
      shards: each is the path of a file of arrays, or a tree whose leaves are arrays and paths of files with one
        array each. All trees have the same structure. The rows of the first shard come first, and so on.
      options: dtype, columns and windows (see `feedline.open_source`).
      read: a function that reads a file; None: the function of the format that the file's suffix names.
      files: the files of the shards, if they are already open.

    Raises:
      ValueError: there are no rows, or leaves or shards do not fit together.
      TypeError: a leaf is neither an array nor a path, or its dtype is not numeric.
      FeedError: a file changed while it was opened.

    Example:
      >>> source = ArraySource([{"x": np.arange(6).reshape(3, 2)}])
      >>> out = {"x": np.empty((2, 2), np.int64)}
      >>> source.read(np.array([2, 0]), out)
      >>> out["x"].tolist()
      [[4, 5], [0, 1]]
    """

    reads_columns = True

    def __init__(
        self,
        shards: Sequence[Any],
        options: OpenOptions | None = None,
        read: Read | None = None,
        files: Files | None = None,
    ) -> None:
        self._given, self._options, self._read_file = list(shards), options or OpenOptions(), read
        leaves = [leaf for shard in shards for leaf in jax.tree.leaves(shard, is_leaf=is_list)]
        self._paths = [os.fspath(leaf) for leaf in leaves if isinstance(leaf, str | os.PathLike)]
        if files is None and self._paths:
            from feedline._src.files.files import Files

            files = Files(list(dict.fromkeys(self._paths)), self._options.store)
        self._opened, self._files = files, list(files or ())
        self._selected = None if files is None else files.selected
        self.picklable = bool(self._files) and len(self._paths) == len(leaves)  # every leaf is a path
        if files is not None and files.in_store and read is None:  # fetch all headers at once
            heads = [_mapped_format(path).head_bytes for path in files.paths]
            files.samples([[(0, length)] if length else [] for length in heads])
        trees = [each for number, shard in enumerate(self._given) for each in self._trees_of(number, shard)]
        for name, tree in trees:
            _check_shard(name, tree, *trees[0])
        parts = [jax.tree.leaves(tree) for _, tree in trees]
        of_files = set(self._paths)
        names = [name if name in of_files else None for name, _ in trees]
        self._hold(list(zip(*parts, strict=True)), jax.tree.structure(trees[0][1]), names)
        if self._selected is not None:
            self._rows = len(self._selected)
        if len(self) == 0:
            window = f", whose windows have {self._options.window} elements" if self._options.window else ""
            raise ValueError(f"a source must have at least one row, got none in {trees[0][0]}{window}; check it")

    def _trees_of(self, number: int, shard: Any) -> list[tuple[str, Any]]:
        """Open a shard. Returns (name for errors, tree of arrays) pairs, in the order of the rows."""
        if isinstance(shard, str | os.PathLike):
            name = os.fspath(shard)
            trees = self._arrays_in(name, self._options)
        else:
            name = f"shard {number}"
            trees = [jax.tree_util.tree_map_with_path(self._leaf, shard, is_leaf=is_list)]
        trees = [jax.tree_util.tree_map_with_path(_checked, tree) for tree in trees]
        if (length := self._options.window) is not None:
            stride = self._options.stride or length
            trees = jax.tree.map(lambda array: windows(array, length, stride), trees)
        return [(name, tree) for tree in trees]

    def _arrays_in(self, path: str, options: OpenOptions) -> list[Any]:
        assert self._opened is not None
        read: Any = self._read_file or _mapped_format(path).open
        return self._opened.opened(
            self._opened.paths.index(path), lambda file: cast("list[Any]", read(file, options))
        )

    def _leaf(self, path: Any, leaf: Any) -> Array | FileArray:
        name = f"source{jax.tree_util.keystr(path)}"
        if isinstance(leaf, str | os.PathLike):
            array, *more = self._arrays_in(os.fspath(leaf), OpenOptions())
            if more or not isinstance(array, np.ndarray | FileArray):
                raise ValueError(
                    f"{name}: a leaf must be one array, and {leaf} has several; pass the path itself as the source"
                )
            return array
        if is_in_memory(leaf):
            return as_array(name, leaf)
        if is_list(leaf):
            raise TypeError(
                f"{name}: a list may mean rows or columns, so it is refused, got a list of {len(leaf)}. For "
                "columns pass a tuple or a dict of arrays. For rows pass numpy.stack(rows); or an object with "
                "__len__ and __getitem__, like grain.MapDataset.source(rows); or, for rows in files, a glob"
            )
        raise TypeError(
            f"{name}: a leaf must be an array or the path of a .npy file, got {type(leaf).__name__}; "
            "leaf[...] reads an array of HDF5, Zarr or netCDF into memory, numpy.asarray(leaf) converts a "
            "sequence of numbers. To read rows only when they are needed, pass the path of the .h5 or .zarr, or "
            "an object with __len__ and __getitem__"
        )

    def _hold(self, leaves: Sequence[Sequence[Array | FileArray]], form: Any, names: Sequence[str | None]) -> None:
        """Set arrays. `form`: their tree; leaves[i][j]: part j of leaf i; names[j]: part j's file, if known."""
        self._leaves, self._names = leaves, names
        self.spec = jax.tree.unflatten(form, _row_specs([parts[0] for parts in leaves]))
        self._rows = sum(map(len, leaves[0]))
        self._files_to_check = itertools.cycle(list(self._files))  # a cycle over a list can be shared by threads
        self._checks = min(CHECKS_A_READ, len(self._files))
        in_files = any(isinstance(part, FileArray) for parts in leaves for part in parts)
        self.is_remote = self._opened is not None and self._opened.in_store and in_files
        self._store_readers: list[Reader] = []
        self._complete_files = 0
        """For files in a store: how many leading files were found to be completely in the cache."""
        if self.is_remote:
            self._readers = self._store_readers = [self._store_reader(parts) for parts in leaves]
        else:
            self._readers = self._memory_readers(lambda file: file.memory())
        self._checks_before = not all(reader.survives_lost_files for reader in self._readers)

    def _memory_readers(self, memory_of: Callable[[File], Any]) -> list[Reader]:
        return [reader_of([_view(part, memory_of) for part in parts]) for parts in self._leaves]

    def _store_reader(self, parts: Sequence[Array | FileArray]) -> Reader:
        in_files = [part for part in parts if isinstance(part, FileArray)]
        in_memory = [part for part in parts if not isinstance(part, FileArray)]
        if in_files and in_memory:
            raise ValueError(
                "an array in a store must be compressed in all files or in none, and it is uncompressed "
                f"in {in_files[0].file.name}; write all files with np.savez, or all with np.savez_compressed"
            )
        if gaps := next((part for part in in_files if part.rows_have_gaps), None):
            raise ValueError(
                f"each row of an array in a store must be one range of bytes, and {gaps.file.name} is in "
                "Fortran order; write it again: np.save(path, np.ascontiguousarray(array))"
            )
        return FileRows(in_files, self._files) if in_files else reader_of(in_memory)

    @property
    def arrays(self) -> ArraySource | None:
        return None if self.is_remote or self._selected is not None else self

    @classmethod
    def joined(cls, sources: Sequence[ArraySource], number: str) -> ArraySource:
        """Concatenate sources that have the same spec, a dict, and lie in no store. The result does not pickle.

        Args:
          number: the key of an additional leaf, with the number of each row's source.
        """
        source = cls.__new__(cls)
        source._opened, source._files = None, [file for each in sources for file in each._files]
        source._selected = None
        parts: list[Any] = [
            tuple(itertools.chain(*leaves)) for leaves in zip(*(each._leaves for each in sources), strict=True)
        ]
        # takes no memory: `broadcast_to` stores the number of a source once, for all its rows
        numbers = tuple(np.broadcast_to(np.int32(i), (len(each),)) for i, each in enumerate(sources))
        tree = {**jax.tree.unflatten(jax.tree.structure(sources[0].spec), parts), number: numbers}
        leaves, form = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, tuple))
        source._hold(leaves, form, [name for each in sources for name in each._names])
        return source

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every shard. No path, so moving a dataset does not change its identity."""
        _check(self._files[:CHECKS_A_READ])
        # in a store, a `GroupSource` may read these files, and its identity must be the same
        if self._opened is not None and self._read_file is not None:
            return {"kind": "groups", "files": self._opened.digests}
        samples = min(_MAX_SAMPLES_A_SHARD, max(1, _SAMPLED_ROWS // len(self._leaves[0])))
        shards = list(zip(*self._leaves, strict=True))
        started = [[_start_digest(part, samples) for part in leaves] for leaves in shards]  # for all files at once
        return {"kind": "arrays", "shards": [[finish() for finish in leaves] for leaves in started]}

    def __len__(self) -> int:
        return self._rows

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        self._checked_read(_read, self._stored_rows(indices_of(rows)), cuts)

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`. The C library computes the row indices and reads the rows in a single call."""
        if self._selected is not None:
            return super().read_ordered(order, epoch, positions, cuts)
        return self._checked_read(_read_ordered, order, epoch, positions, cuts)

    def _stored_rows(self, rows: Indices) -> Indices:
        """Map rows of the source to rows of the arrays."""
        if self._selected is None:
            return rows
        self.check_range(rows)
        return self._selected[rows]

    def read_spans(self, spans: Spans, out: Array) -> None:
        """Fill each row of `out` with the row's spans, side by side, then zeros. For sources of one leaf.

        Args:
          spans: `spans.first` are row indices of this source. No span crosses the end of a shard.
          out: [k, length, *shape of the leaf]. A row without a span may keep its values or become zeros.
        """
        self._checked_read(lambda readers: readers[0].read_spans(spans, out))

    def _checked_read(self, read: Callable[..., T], *arguments: Any) -> T:
        """Return `read(readers, *arguments)`, with the current readers.

        A file that was written to before or during the read is refused, because rows may mix old and new bytes.
        If the cache has lost a mapped file, the rows are read again through the cache. Each read checks only a
        few files, in turn, so that checks stay cheap.
        """
        to_check = list(itertools.islice(self._files_to_check, self._checks))
        readers = self._current_readers()
        maps_cache = self.is_remote and readers is not self._store_readers
        if self._checks_before:
            _check(to_check)
        try:
            found = read(readers, *arguments)
            _check(to_check)
        except FeedError:
            if not maps_cache:
                _check(self._files)  # a changed file explains the error better
                raise
        else:
            if not maps_cache or all(file.memory() is not None for file in to_check):
                return found
        self._readers, self._complete_files = self._store_readers, 0
        for file in self._files:
            if file.in_store:
                file.check()  # drops the mapping, so that a lost file is fetched again
        return read(self._store_readers, *arguments)

    def _current_readers(self) -> list[Reader]:
        """The readers for the next read. In a store, they read mapped memory if the cache has all files."""
        if self._readers is not self._store_readers or library() is None:
            return self._readers
        for file in self._files[self._complete_files :]:
            if file.memory() is None:
                return self._store_readers
            self._complete_files += 1
        memories = {id(file): file.memory() for file in self._files}
        if all(memory is not None for memory in memories.values()):
            self._readers = self._memory_readers(lambda file: memories[id(file)])
        self._complete_files = 0
        return self._readers

    @property
    def files(self) -> Iterable[str] | None:
        """Paths of the files, if every leaf was given as a path; else None."""
        return super().files if self.picklable else None

    def file_of(self, row: int) -> str | None:
        """The file that holds a row of the first leaf; None if that leaf lies in memory."""
        row = int(self._stored_rows(np.array([row]))[0])
        for part, name in zip(self._leaves[0], self._names, strict=True):
            if row < len(part):
                return part.file.name if isinstance(part, FileArray) else name or file_at(part[row:].ctypes.data)
            row -= len(part)
        return None

    @property
    def will_read(self) -> WillRead | None:
        """Fetches rows from a store ahead of their reads. None: no array is in a store, or all are mapped."""
        return self._will_read if self.is_remote and self._readers is self._store_readers else None

    def _will_read(self, rows: Indices, ahead: int, counts: Indices | None = None) -> bool:
        assert self._opened is not None
        in_files = [reader for reader in self._store_readers if isinstance(reader, FileRows)]
        places = (place for reader in in_files for place in reader.places(rows, counts))
        return self._opened.will_read(places, ahead)

    def will_read_spans(self, spans: Spans, ahead: int) -> bool:
        """Start to fetch these spans of the only leaf, if it lies in a store. See `will_read`."""
        return self.will_read is None or self._will_read(spans.first, ahead, spans.length)

    def close(self) -> None:
        """Cancel what is being fetched. A mapped file is unmapped once no array refers to it any more."""
        if self._opened is not None:
            self._opened.close()

    def __reduce__(self) -> Any:
        return ArraySource, (self._given, self._options, self._read_file, self._opened)


def _view(part: Array | FileArray, memory_of: Callable[[File], Any]) -> Array:
    return part.view(memory_of(part.file)) if isinstance(part, FileArray) else part


def _check(files: Iterable[File]) -> None:
    for file in files:
        file.check_open()


def _read(readers: Sequence[Reader], rows: Indices, cuts: Sequence[Cut]) -> None:
    for leaf, columns, out in cuts:
        readers[leaf].read(rows, columns, out)


def _read_ordered(
    readers: Sequence[Reader], order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]
) -> Indices:
    if library() is not None:
        copies = [readers[leaf].copy(len(positions), columns, out) for leaf, columns, out in cuts]
        made = [copy for copy in copies if copy is not None]
        struct = order.struct(epoch, positions)
        if struct is not None and len(made) == len(copies):
            return rows_at_positions(struct, positions, made)
    rows = order.rows_at(epoch, positions)
    _read(readers, rows, cuts)
    return rows


def _start_digest(part: Array | FileArray, samples: int) -> Callable[[], list[Any]]:
    """Start to read sampled rows of an array. Returns a function that returns `digests.of_array` of the array."""
    if not isinstance(part, FileArray) or part.rows_have_gaps or 0 in part.shape:
        return lambda: digests.of_array(_view(part, lambda file: file.memory()), samples)
    rows, length = digests.sampled(len(part), samples), min(part.row_bytes, digests.SAMPLED_BYTES)
    read = part.file.start_samples([(part.offset + row * part.strides[0], length) for row in rows])

    def finish() -> list[Any]:
        # rows of a 1-D array are scalars, which NumPy returns in native byte order
        begins = [
            np.frombuffer(begin, part.dtype)[0] if part.ndim == 1 else np.frombuffer(begin, np.uint8)
            for begin in read()
        ]
        found = dict(zip(rows, begins, strict=True))
        return digests.of_rows(part.dtype, part.shape, found.__getitem__, samples)

    return finish


def _mapped_format(path: str) -> Format:
    """The format of a file of arrays."""
    from feedline._src.formats.registry import formats, suffix_of

    suffix = suffix_of(path)
    form = formats().get(suffix)
    if form is None or form.way != "mapped" or form.open is None:
        raise ValueError(f"a file of arrays ends in .npy, .npz or .bin, got {path}; convert it with numpy.save")
    return form


def _checked(path: Any, array: Array | FileArray) -> Array | FileArray:
    """Check that a leaf holds rows of numbers, and return it as an array."""
    in_file = f" of {array.file.name}" if isinstance(array, FileArray) else ""
    name = f"source{jax.tree_util.keystr(path)}{in_file}"
    if array.ndim == 0:
        raise ValueError(f"{name}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {array.dtype}; encode it as "
            "numbers first (rows of different lengths make dtype object: pad them)"
        )
    return array if isinstance(array, FileArray) else np.asarray(array)


def _check_shard(name: str, tree: Any, first_name: str, first: Any) -> None:
    """Check that the leaves of a shard have one length, and that its rows have the spec of the first shard."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("a source must have at least one array, got an empty tree")
    lengths = {f"source{jax.tree_util.keystr(path)}": len(leaf) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{leaf} has {length}" for leaf, length in lengths.items())
        raise ValueError(
            f"all leaves must have the same number of rows, but {listed} in {name}; cut them to one length"
        )
    if (difference := first_difference(_row_specs(first), _row_specs(tree), "source")) is not None:
        leaf, wanted, found = difference
        raise ValueError(
            f"{leaf}: shards must agree in leaves, dtypes and row shapes; {name} has {found or 'no such leaf'}, "
            f"{first_name} has {wanted or 'no such leaf'}; write them again, or, for columns of one table, "
            'pass a dict of paths: {"x": "x.npy", "y": "y.npy"}'
        )


def _row_specs(tree: Any) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), tree)


def windows(array: Array | FileArray, length: int, stride: int) -> Array | FileArray:
    """The view [n, length, …] of an array [m, …], with n = (m − length) // stride + 1, or n = 0 if m < length.

    Window i holds elements i·stride … i·stride + length − 1. Elements after the last whole window are left out.

    Example:
      >>> windows(np.arange(7), length=3, stride=2).tolist()
      [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    """
    shape = (max(0, (len(array) - length) // stride + 1), length, *array.shape[1:])
    strides = (stride * array.strides[0], *array.strides)
    if isinstance(array, FileArray):
        return dataclasses.replace(array, shape=shape, strides=strides)
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)


# --- readers of the rows of one leaf ---


def reader_of(parts: Sequence[Array]) -> Reader:
    """The fastest reader for arrays in memory that have one dtype and one row shape."""
    return RowGather(parts) if RowGather.can_gather(parts) else NumpyRows(parts)


class NumpyRows(Reader):
    """Reads rows of consecutive arrays in memory, with NumPy.

    Example:
      >>> rows = NumpyRows([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 1), int)
      >>> rows.read(np.array([3, 2]), (slice(1, 2),), out)
      >>> out.tolist()
      [[7], [5]]
    """

    survives_lost_files = False

    def __init__(self, parts: Sequence[Array]) -> None:
        super().__init__(parts[0].dtype, parts[0].shape[1:])
        self._parts, self._shards = parts, Shards([len(part) for part in parts])

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """See `Reader`."""
        for number, local, at in self._shards.split(rows):
            out[at] = cut(self._parts[number][local], columns)


def cut(values: Array, columns: Columns) -> Array:
    """Select `columns` of all rows."""
    for axis, column in enumerate(columns, start=1):
        values = values[(slice(None),) * axis + (column,)]
    return values


class FileRows(Reader):
    """Reads rows of arrays in files that are not mapped: objects in a store that are not completely cached.

    Args:
      parts: the arrays, whose rows have no gaps.
      files: the files that hold the arrays.
    """

    def __init__(self, parts: Sequence[FileArray], files: Sequence[File]) -> None:
        super().__init__(parts[0].dtype, parts[0].shape[1:])
        numbers = {id(file): number for number, file in enumerate(files)}
        self._files, self._shards = files, Shards([len(part) for part in parts])
        self._file_of = np.array([numbers[id(part.file)] for part in parts])  # the number of each part's file
        self._first = np.array([part.offset for part in parts], np.int64)
        self._stride = np.array([part.strides[0] for part in parts], np.int64)
        self._row_bytes = parts[0].row_bytes

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """See `Reader`. FeedError: a file was changed, or its store cannot be read."""
        is_whole = all(isinstance(column, slice) and column == slice(None) for column in columns)
        direct = is_whole and out.dtype == self._dtype and out.flags.c_contiguous
        target = out if direct else np.empty((len(rows), *self._shape), self._dtype)
        data = target.reshape(len(rows), -1 if target.size else 0).view(np.uint8)
        for number, at, offsets in self._located(rows):
            if isinstance(at, slice):
                self._files[number].read_rows(offsets, data[at])
            else:
                scratch = np.empty((len(offsets), self._row_bytes), np.uint8)
                self._files[number].read_rows(offsets, scratch)
                data[at] = scratch
        if not direct:
            out[...] = cut(target, columns)

    def read_spans(self, spans: Spans, out: Array) -> None:
        """See `Reader`. Raises whatever `read` raises."""
        parts = [b""] * len(spans.first)
        for number, at, offsets in self._located(spans.first):
            found = self._files[number].read(offsets, spans.length[at] * self._row_bytes)
            for i, data in zip(np.arange(len(parts))[at].tolist(), found, strict=True):
                parts[i] = data
        values = np.frombuffer(b"".join(parts), self._dtype).reshape(-1, *self._shape)
        copy_values(spans, values, out)

    def places(self, rows: Indices, counts: Indices | None = None) -> Iterator[Place]:
        """Yield where rows lie in each file: these rows or, with `counts`, counts[i] rows from rows[i] on."""
        for number, at, offsets in self._located(rows):
            lengths = np.full(len(offsets), self._row_bytes)
            yield number, offsets, lengths if counts is None else lengths * counts[at]

    def _located(self, rows: Indices) -> Iterator[tuple[int, slice | Indices, Indices]]:
        """Yield (number of a file, offsets in `rows`, byte offsets in the file) for each file that occurs."""
        part = self._shards.of(rows)
        offsets = self._first.take(part) + (rows - self._shards.firsts.take(part)) * self._stride.take(part)
        for number, at in offsets_by_label(self._file_of.take(part), len(self._files)):
            yield number, at, offsets[at]
