"""`Mixture`: several sources as one, with weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.options import Order, checked_integer
from feedline._src.order.compiled import Positions
from feedline._src.order.epoch import RowOrder
from feedline._src.order.mixture import End, MixtureOrder
from feedline._src.rows.row_source import Rows
from feedline._src.rows.source import Columns, Cut, OwnOrder, Source, WillRead
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.mixture_arguments import SOURCE, Weights, check_specs, opened, orders_of, phases_of

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class Mixture(Source):
    """Several sources as one, with weights: `feedline.Feed` takes it as its source.

    Which row of which source stands at a position is a pure function, so batches are the same on any number of
    processes, and a feed resumes anywhere in constant time. Each row gets the leaf "source": int32, the number of
    its source in the order of the keys.

    A block is the smallest number of rows that has exactly these shares: 10 for 0.7 and 0.3. Each block has
    exactly these shares, the first m rows of it have them to within one row, and any other m adjacent rows to
    within one row with two sources, to within less than two rows with more.

    Args:
      sources: by name, each anything with random access that a feed takes: arrays, paths, a `RowSource`, a
        `grain.MapDataset`. All have the same leaves: a dict without the key "source".
      weights: by name, with any sum. Or phases, [(0, weights), (1_000_000, weights)]: the position of the epoch
        from which on these weights hold. With phases a weight may be 0, as long as it is above 0 in one of them. A
        share is 0 or at least one row in 65,536.
      orders: by name, of the sources that shall not have the default. Default: shuffled, each with a seed of its
        own that comes from `seed`; but a Grain dataset keeps its order.
      seed: of these orders, and of the keys that a transform gets.
      end: of an epoch. "endless": the only epoch has no end. "first_exhausted": after the last row of the source
        that is the first to have given all its rows. "all_exhausted": of the source that is the last to.

    Each source has its own epochs: after its last row it begins again, shuffled anew. The next epoch of the
    mixture goes on in each source where the one before stopped.

    Raises:
      ValueError, TypeError: the sources do not fit together, or another argument is wrong.

    Example:
      >>> web, code = {"x": np.arange(6)}, {"x": np.arange(10, 13)}
      >>> mixture = Mixture({"web": web, "code": code}, weights={"web": 2, "code": 1}, end="all_exhausted")
      >>> mixture
      <Mixture: rows 9, source int32[], x int64[], web 2 of 3, 6 rows, code 1 of 3, 3 rows>
      >>> mixture.order.rows_at(epoch=0, positions=range(9)).tolist()
      [1, 8, 5, 2, 6, 3, 4, 7, 0]
    """

    format = "mixture"

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        orders: Mapping[str, Order] | None = None,
        seed: int = 0,
        end: End = "endless",
    ) -> None:
        self._given = dict(sources) if isinstance(sources, Mapping) else {}
        self._arguments: dict[str, Any] = {"weights": weights, "seed": seed, "end": end}
        self._sources = opened(sources)
        check_specs(self._sources)
        seed = checked_integer("seed", seed, at_least=0, at_most=(1 << 64) - 1)
        self.order = MixtureOrder(
            names=tuple(self._sources),
            lengths=tuple(map(len, self._sources.values())),
            orders=orders_of(self._sources, orders, seed),
            phases=phases_of(weights, self._sources),
            end=end,
            seed=seed,
        )
        own = next(iter(self._sources.values())).spec
        self._at = len(jax.tree.leaves([own[key] for key in sorted(own) if key < SOURCE]))
        """The number of the leaf "source"."""
        self.spec = {**own, SOURCE: jax.ShapeDtypeStruct((), np.int32)}
        self._ends = np.array(self.order.firsts[1:])
        given = list(self._sources.values())
        self.own_order: OwnOrder = "endless mixture" if end == "endless" else "mixture"
        self.picklable = all(source.picklable for source in given)
        self.positioned = any(source.positioned for source in given)
        self.reads_columns = all(source.reads_columns for source in given)
        if all(source.ragged_leaves for source in given):  # the others have the largest length
            self.ragged_leaves = tuple(leaf + (leaf >= self._at) for leaf in given[0].ragged_leaves)
        arrays = [source.arrays for source in given]
        self._arrays = None if None in arrays else ArraySource.joined(arrays, SOURCE)

    @property
    def identity(self) -> dict[str, Any]:
        """Those of the sources. Weights and orders are part of the order."""
        return self._identity(lambda source: source.identity)

    def identity_allowing_bad_rows(self) -> dict[str, Any]:
        """The `identity`, of which rows that cannot be read are a part, instead of an error."""
        return self._identity(lambda source: source.identity_allowing_bad_rows())

    def _identity(self, of: Callable[[Source], Any]) -> dict[str, Any]:
        sources = [[name, len(source), of(source)] for name, source in self._sources.items()]
        return {"kind": "mixture", "sources": sources}

    def check_rows(self) -> None:
        """See `Indexed.check_rows`: of all sources."""
        for source in self._sources.values():
            source.check_rows()

    @property
    def arrays(self) -> ArraySource | None:
        """See `Source`: all rows as one, if all are arrays outside of stores."""
        return self._arrays

    @property
    def parts(self) -> Mapping[str, range]:
        """The row indices of each source."""
        firsts = self.order.firsts
        return {name: range(firsts[i], firsts[i + 1]) for i, name in enumerate(self._sources)}

    def order_for(self, asked: Order | None) -> MixtureOrder:
        """Its own: a feed refuses another."""
        return self.order

    def __len__(self) -> int:
        """The rows of all sources."""
        return self.order.firsts[-1]

    @property
    def epoch_rows(self) -> int:
        """Positions of an epoch of the mixture."""
        return self.order.rows

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`. Row indices count one source after the other."""
        if self._arrays is not None:
            self._arrays.read(rows, out)
            return
        for part in self._parts(rows):
            with part.filled(self._own(rows, out)) as target:
                part.source.read(part.rows, target)

    @property
    def will_read(self) -> WillRead | None:
        """Of a mixture with a source in a store; None for others."""
        return None if all(source.will_read is None for source in self._sources.values()) else self._will_read

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        parts = [(part.source.will_read, part.rows) for part in self._parts(rows)]
        return all(will_read(some, ahead) for will_read, some in parts if will_read is not None)

    def padded_length(self, rows: Indices) -> int:
        """That of the longest row of any source."""
        return max(part.source.padded_length(part.rows) for part in self._parts(rows))

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`. Of arrays outside of stores in one C call."""
        if self._arrays is None:
            return super().read_ordered(order, epoch, positions, cuts)
        return self._arrays.read_ordered(order, epoch, positions, cuts)

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """As `read`. A source is given epochs and positions in its own order, and the keys of the mixture."""
        epochs, positions = self.order.own_positions(rows.epoch, rows.position)
        for part in self._parts(rows.index):
            here = part.here
            with part.filled(self._own(rows.index, out)) as target:
                own = Rows(epochs[here], positions[here], part.rows, rows.key[here])
                part.source.read_positioned(own, target)

    def _own(self, rows: Indices, out: Any) -> Any:
        """The leaves of the sources, after the leaf "source" was written."""
        out[SOURCE][...] = self._numbers(rows)
        return {key: leaf for key, leaf in out.items() if key != SOURCE}

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] of one leaf to out[i]."""
        if self._arrays is not None:
            self._arrays.read_leaf(leaf, rows, columns, out)
            return
        if leaf == self._at:
            out[...] = self._numbers(rows)
            return
        for part in self._parts(rows):
            with part.filled(out) as target:
                part.source.read_leaf(leaf - (leaf > self._at), part.rows, columns, target)

    def close(self) -> None:
        """Close the sources that were opened here. A feed does not close a mixture, which it was given."""
        for name, source in self._sources.items():
            if source is not self._given[name]:
                source.close()

    def _numbers(self, rows: Indices) -> Indices:
        """The number of the source of each row."""
        return self._ends.searchsorted(rows, side="right")

    def _parts(self, rows: Indices) -> Iterator[_Part]:
        """The rows of each source that has some of these."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")
        numbers = self._numbers(rows)
        for i, (name, source) in enumerate(self._sources.items()):
            here, first = np.flatnonzero(numbers == i), self.order.firsts[i]
            if len(here):
                yield _Part(name, source, first, rows[here] - first, here)

    def _facts(self) -> list[tuple[str, str]]:
        of_sources = []
        for i, (name, length) in enumerate(zip(self.order.names, self.order.lengths, strict=True)):
            shares = ", then ".join(f"{phase.counts[i]:,} of {sum(phase.counts):,}" for phase in self.order.phases)
            of_sources.append((name, f"{shares}, {length:,} rows"))
        return [*super()._facts(), *of_sources]

    def __reduce__(self) -> Any:
        orders = dict(zip(self.order.names, self.order.orders, strict=True))
        return functools.partial(Mixture, orders=orders, **self._arguments), (self._sources,)


class _Part(NamedTuple):
    """Some rows of a source: rows `rows` of its own, at index `here` of what is read; row 0 is `first` of all."""

    name: str
    source: Source
    first: int
    rows: Indices
    here: Indices

    @contextlib.contextmanager
    def filled(self, out: Any) -> Iterator[Any]:
        """A tree of arrays for these rows, which are at index here[i] of the leaves of `out` afterwards.

        A source writes its rows to one array, and in the batch they alternate with those of others. So they are
        copied once more, unless all rows are of this source.
        """
        count = len(self.here)
        whole = count == len(jax.tree.leaves(out)[0])
        target = out if whole else jax.tree.map(lambda leaf: np.empty((count, *leaf.shape[1:]), leaf.dtype), out)
        try:
            yield target
        except RowError as error:
            row = None if error.row is None else error.row + self.first
            message = f"{error.message} (in {self.name!r} of the mixture)"
            raise RowError(message, stage=error.stage, row=row, file=error.file) from error.__cause__ or error
        if not whole:
            for leaf, values in zip(jax.tree.leaves(out), jax.tree.leaves(target), strict=True):
                leaf[self.here] = values
