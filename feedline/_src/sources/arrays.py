"""The columnar source: rows of arrays in memory or mapped from files."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.formats.open_options import OpenOptions
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.compiled import EpochOrder, Positions, epoch_order
from feedline._src.order.epoch import rows_at
from feedline._src.placement.plan import Columns
from feedline._src.rows import digests
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices
from feedline._src.sources.array_trees import OpenedArrays, as_tree, checked_leaves, why_empty
from feedline._src.sources.row_gather import RowGather, fill

if TYPE_CHECKING:
    from feedline._src.files.version import FileVersion
    from feedline._src.order.mixture import MixtureOrder
    from feedline._src.stores.client import Version

Array = npt.NDArray[Any]
_SAMPLED_ROWS = 1 << 10  # of a leaf, over all shards: on a cold disk each row is a seek
_MAX_SAMPLES_A_SHARD = 16
_CHECKS_A_READ = 4  # files, at some 5 µs each: checks must cost less than the copy


class ArraySource(IndexedSource):
    """A `RowSource` over a tree of arrays whose first axes agree; each leaf may come in shards.

    Reads are thread-safe: they only copy out of arrays. A pickled source holds paths, and opens the
    files again in the other process.

    Args:
      shards: each a path to a `.npy`, `.npz`, or `.bin` file, or a tree of arrays and of
        paths to `.npy` files, all of one structure. The source has the rows of the first shard, then of the
        second, and so on.
      options: dtype, columns and windows (see `feedline.open_source`).
      names: of the shards, for errors; by default, their paths or numbers.

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

    def __init__(
        self, shards: Sequence[Any], options: OpenOptions | None = None, names: Sequence[str] | None = None
    ) -> None:
        self._given = list(shards)
        self._names = names
        self._options = options or OpenOptions()
        leaves = jax.tree.leaves(self._given)
        self._paths = [os.fspath(leaf) for leaf in leaves if isinstance(leaf, str | os.PathLike)]
        self._opened = OpenedArrays.of(self._paths, self._options)
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
        source._opened, source._remote = OpenedArrays(versions, None), None
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
        trees = [as_tree(shard, self._options, self._opened) for shard in self._given]
        names = self._names or [
            os.fspath(shard) if isinstance(shard, str | os.PathLike) else f"shard {i}"
            for i, shard in enumerate(self._given)
        ]
        self._files_to_check = itertools.cycle(self._opened.versions.items())
        parts = [checked_leaves(tree, name, trees[0], names[0]) for tree, name in zip(trees, names, strict=True)]
        self._leaves = list(zip(*parts, strict=True))
        self._rows = sum(len(part[0]) for part in parts)
        if self._rows == 0:
            raise ValueError(f"a source must have at least one row, got {why_empty(self._options, names[0])}")
        self._gathers = [RowGather(leaf) for leaf in self._leaves]
        remote = self._opened.objects
        self._remote = None
        if remote is not None:
            from feedline._src.sources.remote_rows import RemoteRows

            self._remote = RemoteRows(self._leaves, remote)
        self.spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), trees[0])

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every shard: no path, so a moved data set stays the same."""
        self._check(list(self._opened.versions.items())[:_CHECKS_A_READ])
        samples = min(_MAX_SAMPLES_A_SHARD, max(1, _SAMPLED_ROWS // len(self._leaves[0])))
        parts = list(zip(*self._leaves, strict=True))
        if self._remote is not None:
            return {"kind": "arrays", "shards": self._remote.digests(parts, samples)}
        sampled = [[digests.of_array(part, samples) for part in shard] for shard in parts]
        return {"kind": "arrays", "shards": sampled}

    @property
    def is_remote(self) -> bool:
        """Whether any leaf lies in a store, so that rows must be fetched before their memory is read."""
        return self._remote is not None

    @property
    def picklable(self) -> bool:
        """Whether worker processes can open it again, because every leaf is a path."""
        return all(isinstance(leaf, str | os.PathLike) for leaf in jax.tree.leaves(self._given))

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a row is in a file whose disk failed.
          FeedError: a file was written to or truncated.
        """
        with self._files_unchanged(), self._present(range(len(self._leaves)), rows):
            for gather, target in zip(self._gathers, jax.tree_util.tree_leaves(out), strict=True):
                gather.read(rows, (slice(None),) * (target.ndim - 1), target)

    @property
    def files(self) -> Iterable[str] | None:
        """As of `Indexed`; None also if one of them was replaced: the source reads the file that it has open."""
        try:
            for path, version in self._opened.versions.items():
                version.check(path)
        except FeedError:
            return None
        return super().files if self.picklable else None

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype; errors as `read`."""
        with self._files_unchanged(), self._present([leaf], rows):
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
        with self._files_unchanged():
            return self._read_in_order(order, epoch, positions, cuts)

    def _read_in_order(
        self,
        order: Order | MixtureOrder,
        epoch: int,
        positions: Positions,
        cuts: Sequence[tuple[int, Columns, Array]],
    ) -> Indices:
        with contextlib.nullcontext(True) if self._remote is None else self._remote.all_present() as readable:
            filled = self._filled(order, epoch, positions, cuts) if readable else None
        if filled is not None:
            return filled
        if isinstance(order, Order):
            rows = rows_at(order, len(self), epoch, positions)
        else:
            rows = order.rows_at(epoch, positions)
        with self._present([leaf for leaf, _, _ in cuts], rows):
            for leaf, columns, out in cuts:
                self._gathers[leaf].read(rows, columns, out)
        return rows

    def _filled(
        self,
        order: Order | MixtureOrder,
        epoch: int,
        positions: Positions,
        cuts: Sequence[tuple[int, Columns, Array]],
    ) -> Indices | None:
        """As `read_in_order`, in one call of the C library; None if it cannot do this."""
        if (compiled := library()) is None:
            return None
        copies = [self._gathers[leaf].copy(len(positions), columns, out) for leaf, columns, out in cuts]
        made = [copy for copy in copies if copy is not None]
        if isinstance(order, Order):
            struct: EpochOrder | None = epoch_order(order, len(self), epoch)
        else:
            struct = order.struct(epoch, positions)
        if len(made) < len(copies) or struct is None:
            return None
        return fill(compiled, struct, positions, made)

    def file_of(self, row: int) -> str | None:
        """The file that holds a row of the first leaf; None if that is memory."""
        from feedline._src.formats.npy import file_at

        for part in self._leaves[0]:
            if row < len(part):
                return file_at(part[row:].ctypes.data)
            row -= len(part)
        return None

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """The `will_read` of a `ToldSource`, for arrays in a store until all rows are there; None for others."""
        return None if self._remote is None or self._remote.is_complete else self._remote.fetch_ahead

    def close(self) -> None:
        """Give up what is being fetched. A mapped file is unmapped with the last array that refers to it."""
        if self._opened.objects is not None:
            self._opened.objects.close()

    def _present(self, leaves: Sequence[int], rows: Indices) -> contextlib.AbstractContextManager[None]:
        """Within the `with` block, these rows of these leaves can be read."""
        return contextlib.nullcontext() if self._remote is None else self._remote.present(leaves, rows)

    @contextlib.contextmanager
    def _files_unchanged(self) -> Iterator[None]:
        """Refuse what is read in the block if a file was written to, also meanwhile: rows may be of both states.

        Only the next few of many files are checked each time, to stay cheap.
        """
        few = list(itertools.islice(self._files_to_check, min(_CHECKS_A_READ, len(self._opened.versions))))
        if not all(gather.survives_lost_files for gather in self._gathers):
            self._check(few)
        try:
            yield
        except FeedError:
            self._check(self._opened.versions.items())  # a change explains it better
            raise
        self._check(few)

    def _check(self, files: Iterable[tuple[str, FileVersion]]) -> None:
        for path, version in files:
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
