"""The mapped way to read: rows of arrays that lie in memory or in files as they are."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import FileArray
from feedline._src.native.library import library
from feedline._src.native.spans import Spans
from feedline._src.order.compiled import Positions
from feedline._src.order.epoch import RowOrder
from feedline._src.rows import digests
from feedline._src.rows.row_source import Rows
from feedline._src.rows.shards import Indices
from feedline._src.rows.source import Columns, Cut, Source, WillRead
from feedline._src.rows.values import is_list
from feedline._src.sources.array_trees import (
    Read,
    checked_leaves,
    mapped_format,
    read_by_suffix,
    trees_of,
    why_empty,
    windows,
)
from feedline._src.sources.row_gather import FileRows, RowGather, file_at, fill

if TYPE_CHECKING:
    from feedline._src.files.file import File
    from feedline._src.files.files import Files

Array = npt.NDArray[Any]
Readers = Sequence[RowGather | FileRows]
"""For each leaf what reads its rows."""
T = TypeVar("T")
_SAMPLED_ROWS = 1 << 10  # of a leaf, over all shards: on a cold disk each row is a seek
_MAX_SAMPLES_A_SHARD = 16
_CHECKS_A_READ = 4  # files, at some 5 µs each: checks must cost less than the copy


class ArraySource(Source):
    """A `RowSource` over a tree of arrays whose first axes agree; each leaf may come in shards.

    Reads are thread-safe. A pickled source holds paths, and opens the files again in the other process.

    Local files are mapped. Rows of objects in a store are read from the cache, until it has all of them: from then
    on they are mapped as well, until it evicts one.

    Args:
      shards: each a path to a file of arrays, or a tree of arrays and of paths to files of one array, all of one
        structure. The source has the rows of the first shard, then of the second, and so on.
      options: dtype, columns and windows (see `feedline.open_source`).
      read: (file, options) → the arrays of a file, as a list of trees whose rows follow each other.
      files: those of the shards, if they are open; or, of arrays in memory, those that must not change.

    Raises:
      ValueError: no rows, or leaves or shards that do not fit together.
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
        read: Read = read_by_suffix,
        files: Files | None = None,
    ) -> None:
        self._given, self._options, self._read_file = list(shards), options or OpenOptions(), read
        leaves = [leaf for shard in shards for leaf in jax.tree.leaves(shard, is_leaf=is_list)]
        self._paths = [os.fspath(leaf) for leaf in leaves if isinstance(leaf, str | os.PathLike)]
        self.picklable = len(self._paths) == len(leaves)  # every leaf is a path
        if files is None and self._paths:
            from feedline._src.files.files import Files

            files = Files(list(dict.fromkeys(self._paths)), self._options.store)
        self._opened, self._files = files, cast("Sequence[File]", files or ())
        if files is not None and files.in_store and read is read_by_suffix:
            heads = [mapped_format(path).head_bytes for path in files.paths]
            files.samples([[(0, length)] if length else [] for length in heads])  # into the cache, all at once
        numbers = {} if files is None else {path: number for number, path in enumerate(files.paths)}

        def opened(path: str, some: OpenOptions) -> list[Any]:
            assert files is not None
            return files.opened(numbers[path], lambda file: read(file, some))

        trees, names = [], []
        for number, shard in enumerate(self._given):
            path = os.fspath(shard) if isinstance(shard, str | os.PathLike) else None
            for tree in trees_of(shard, self._options, opened):
                trees.append((tree, path or f"shard {number}"))
                names.append(path)
        parts = [checked_leaves(tree, name, *trees[0]) for tree, name in trees]
        self._hold(list(zip(*parts, strict=True)), jax.tree.structure(trees[0][0]), names)
        if len(self) == 0:
            raise ValueError(f"a source must have at least one row, got {why_empty(self._options, trees[0][1])}")

    def _hold(self, leaves: Sequence[Sequence[Array | FileArray]], form: Any, names: Sequence[str | None]) -> None:
        """Read from these parts of each leaf of a tree of this form. `names`: the file of each part, if known."""
        self._leaves, self._names = leaves, names
        rows = [jax.ShapeDtypeStruct(parts[0].shape[1:], parts[0].dtype) for parts in leaves]
        self.spec = jax.tree.unflatten(form, rows)
        self._rows = sum(map(len, leaves[0]))
        self._files_to_check = itertools.cycle(list(self._files))  # of a list: threads share this iterator
        self._checks = min(_CHECKS_A_READ, len(self._files))
        in_files = [part for parts in leaves for part in parts if isinstance(part, FileArray)]
        self.is_remote = self._opened is not None and self._opened.in_store and bool(in_files)
        """Whether any leaf lies in a store, so that rows must be fetched before they are read."""
        if not self.is_remote:
            self._readers = self._gathers(_memory)
            self._survives = all(reader.survives_lost_files for reader in self._readers)
            return
        for part in in_files:
            if part.rows_have_gaps:
                raise ValueError(
                    f"each row of an array in a store must be one range of bytes, and {part.file.name} is in "
                    "Fortran order; write it again: np.save(path, np.ascontiguousarray(array))"
                )
        self._from_files = [FileRows(parts, self._files) for parts in leaves]
        self._followed: tuple[Readers, int | None] = self._from_files, 0
        """In a store: the readers, and the number of a file that was not complete in the cache when that was last
        asked. None: all were, and the readers are gathers."""
        self._survives = True

    @property
    def arrays(self) -> ArraySource | None:
        """See `Source`."""
        return None if self.is_remote else self

    def _gathers(self, memory_of: Callable[[File], Any]) -> Readers:
        return [RowGather([_view(part, memory_of) for part in parts]) for parts in self._leaves]

    @classmethod
    def joined(cls, sources: Sequence[ArraySource], number: str) -> ArraySource:
        """One source with the rows of all of these, which have one spec: a dict. It does not pickle.

        None of them may lie in a store.

        Args:
          number: the key of a leaf more: the number of the source of each row.
        """
        source = cls.__new__(cls)
        source._opened, source._files = None, [file for each in sources for file in each._files]
        parts: list[Any] = [
            tuple(itertools.chain(*leaves)) for leaves in zip(*(each._leaves for each in sources), strict=True)
        ]
        # no memory: all rows of a source lie at the same address
        numbers = tuple(np.broadcast_to(np.int32(i), (len(each),)) for i, each in enumerate(sources))
        tree = {**jax.tree.unflatten(jax.tree.structure(sources[0].spec), parts), number: numbers}
        leaves, form = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, tuple))
        source._hold(leaves, form, [name for each in sources for name in each._names])
        return source

    def windows(self, length: int, stride: int) -> ArraySource:
        """The windows of the rows of each part, as `open_source` has them, of the same open files."""
        source = copy.copy(self)
        source._options = dataclasses.replace(self._options, window=length, stride=stride)
        cut = [[windows(part, length, stride) for part in parts] for parts in self._leaves]
        source._hold(cut, jax.tree.structure(self.spec), self._names)
        return source

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every shard: no path, so a moved data set stays the same."""
        self._check(self._files[:_CHECKS_A_READ])
        if (
            self._opened is not None and self._read_file is not read_by_suffix
        ):  # elsewhere it may be read in groups
            return {"kind": "groups", "files": self._opened.digests}
        samples = min(_MAX_SAMPLES_A_SHARD, max(1, _SAMPLED_ROWS // len(self._leaves[0])))
        fetched = self._sampled(samples) if self.is_remote else {}

        def digest(leaf: int, shard: int) -> list[Any]:
            part, rows = self._leaves[leaf][shard], fetched.get((leaf, shard))
            if rows is not None:
                return digests.of_rows(part.dtype, part.shape, rows.__getitem__, samples)
            return digests.of_array(_view(part, _memory), samples)

        leaves, shards = range(len(self._leaves)), range(len(self._leaves[0]))
        return {"kind": "arrays", "shards": [[digest(leaf, shard) for leaf in leaves] for shard in shards]}

    def _sampled(self, samples: int) -> dict[tuple[int, int], dict[int, Array]]:
        """For each leaf and part in a file: some bytes of the sampled rows, of all files at once."""
        numbers = {id(file): number for number, file in enumerate(self._files)}
        ranges: list[list[tuple[int, int]]] = [[] for _ in self._files]
        places = []
        for leaf, parts in enumerate(self._leaves):
            for shard, part in enumerate(parts):
                if not isinstance(part, FileArray):
                    continue
                number, length = numbers[id(part.file)], min(part.row_bytes, digests.SAMPLED_BYTES)
                for row in digests.sampled(len(part), samples):
                    places.append(((leaf, shard), row, part, number, len(ranges[number])))
                    ranges[number].append((part.offset + row * part.strides[0], length))
        assert self._opened is not None
        data = self._opened.samples(ranges)
        found: dict[tuple[int, int], dict[int, Array]] = {}
        for key, row, part, number, at in places:
            # of a 1-D array the scalar, which NumPy makes in native byte order
            first = np.frombuffer(data[number][at], part.dtype if part.ndim == 1 else np.uint8)
            found.setdefault(key, {})[row] = first[0] if part.ndim == 1 else first
        return found

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a row is in a file whose disk failed.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        targets = jax.tree_util.tree_leaves(out)
        cuts = [(leaf, (slice(None),) * (target.ndim - 1), target) for leaf, target in enumerate(targets)]
        self._guarded(_read, rows, cuts)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype; errors as `read`."""
        self._guarded(_read, rows, [(leaf, columns, out)])

    def read_spans(self, spans: Spans, out: Array) -> None:
        """Write values that stand side by side in rows, of a source of one array with one axis; errors as `read`.

        Args:
          spans: `first` counts values over all shards; none crosses the end of a shard.
          out: [rows, length], each row contiguous; of the dtype of the values, or int32 where that is uint16.
            After the last span of a row are zeros.
        """
        self._guarded(lambda readers: readers[0].read_spans(spans, out))

    def will_read_spans(self, spans: Spans, ahead: int) -> bool:
        """Start to fetch them, if they lie in a store; as `will_read`."""
        if self._opened is None or self.will_read is None:
            return True
        return self._opened.will_read(self._from_files[0].places(spans.first, spans.length), ahead)

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`. The C library does this in a single call, including the computation of the rows."""
        return self._guarded(_read_ordered, order, epoch, positions, cuts)

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        self._guarded(_read, rows.index if isinstance(rows, Rows) else rows, cuts)

    def _guarded(self, read: Callable[..., T], *arguments: Any) -> T:
        """What `read` returns for the present readers and these arguments.

        A file that was written to is refused, also if that happens during the read: rows may be of both states. If
        a cache has lost a file that is mapped, rows are read again from what it has. Only the next few of many
        files are checked each time, to stay cheap.
        """
        few = list(itertools.islice(self._files_to_check, self._checks))
        readers = self._follow() if self.is_remote else self._readers
        if not self._survives:
            self._check(few)
        try:
            found = read(readers, *arguments)
            self._check(few)
            if not self.is_remote or readers is self._from_files or all(file.memory() is not None for file in few):
                return found
        except FeedError:
            if not self.is_remote or readers is self._from_files:
                self._check(self._files)  # a change explains it better
                raise
        self._followed = self._from_files, 0
        for file in self._files:
            if file.in_store:
                file.check()  # so that it is not mapped again as it is
        return read(self._from_files, *arguments)

    def _follow(self) -> Readers:
        """The readers for what the cache has now: gathers, once all files were complete in it.

        Each call asks about one file that was missing.
        """
        readers, missing = self._followed
        if missing is None or library() is None or self._files[missing].memory() is None:
            return readers
        others = itertools.chain(range(missing + 1, len(self._files)), range(missing))
        missing = next((number for number in others if self._files[number].memory() is None), None)
        found: tuple[Readers, int | None] = self._from_files, missing or 0
        if missing is None:
            memories = {id(file): file.memory() for file in self._files}
            if all(memory is not None for memory in memories.values()):
                found = self._gathers(lambda file: memories[id(file)]), None
        self._followed = found
        return found[0]

    def _check(self, files: Iterable[File]) -> None:
        for file in files:
            file.check_open()

    @property
    def files(self) -> Iterable[str] | None:
        """Paths of the files that the rows are made of. None: of other things, too; or one was replaced."""
        try:
            for file in self._files:
                file.check()
        except FeedError:
            return None
        return super().files if self.picklable else None

    def file_of(self, row: int) -> str | None:
        """The file that holds a row of the first leaf; None if that is memory."""
        for part, name in zip(self._leaves[0], self._names, strict=True):
            if row < len(part):
                if isinstance(part, FileArray):
                    return part.file.name
                return name or file_at(part[row:].ctypes.data)
            row -= len(part)
        return None

    @property
    def will_read(self) -> WillRead | None:
        """For arrays in a store until all are mapped; None for others."""
        return self._fetch_ahead if self.is_remote and self._followed[1] is not None else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        assert self._opened is not None
        return self._opened.will_read((place for each in self._from_files for place in each.places(rows)), ahead)

    def close(self) -> None:
        """Give up what is being fetched. A mapped file is unmapped with the last array that refers to it."""
        if self._opened is not None:
            self._opened.close()

    def __reduce__(self) -> Any:
        return ArraySource, (self._given, self._options, self._read_file, self._opened)


def _memory(file: File) -> Any:
    return file.memory()


def _view(part: Array | FileArray, memory_of: Callable[[File], Any]) -> Array:
    return part.view(memory_of(part.file)) if isinstance(part, FileArray) else part


def _read(readers: Readers, rows: Indices, cuts: Sequence[Cut]) -> None:
    for leaf, columns, out in cuts:
        readers[leaf].read(rows, columns, out)


def _read_ordered(
    readers: Readers, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]
) -> Indices:
    if (compiled := library()) is not None:
        copies = [readers[leaf].copy(len(positions), columns, out) for leaf, columns, out in cuts]
        made = [copy for copy in copies if copy is not None]
        struct = order.struct(epoch, positions)
        if struct is not None and len(made) == len(copies):
            return fill(compiled, struct, positions, made)
    rows = order.rows_at(epoch, positions)
    _read(readers, rows, cuts)
    return rows
