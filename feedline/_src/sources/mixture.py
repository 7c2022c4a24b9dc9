"""`Mixture`: several sources as one, with weights."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.errors import RowError
from feedline._src.options import Order, checked_integer
from feedline._src.order.epoch import Positions, RowOrder
from feedline._src.order.mixture import LARGEST_BLOCK, End, MixtureOrder, Phase, counts_of, seed_of_source
from feedline._src.order.past import phases_of_state
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import Cut, OwnOrder, Rows, Source, WillRead, indices_of
from feedline._src.rows.spec import first_difference
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.as_source import as_source
from feedline._src.sources.lanes import is_stream

Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
"""Weights by name; or phases: pairs (position, weights by name). A pair's weights hold from its position on."""
_SOURCE = "source"
"""The key of the leaf that says which source a row is from."""


class Mixture(Source):
    """Several sources as one, with weights: `feedline.Feed` takes it as its source.

    A pure function determines which row of which source stands at a position. So batches are the same on any
    number of processes, and a feed resumes anywhere in constant time. Each row gets the leaf "source": int32, the
    number of its source in the order of `sources`.

    A block is the smallest number of rows that has exactly the shares of the weights: 10 for 0.7 and 0.3. If this
    number exceeds 65,536, shares are rounded to a block of 65,536. Each block has exactly these shares, and its
    first m rows have them to within one row. Any m adjacent rows have them to within one row if there are two
    sources, and to within less than two rows if there are more.

    Args:
      sources: by name, each anything with random access that a feed takes: arrays, paths, a `RowSource`, a
        `grain.MapDataset`. All have the same leaves, in a dict without the key "source".
      weights: by name, with any sum. Or phases, [(0, weights), (1_000_000, weights)]: each pair starts with the
        position in the epoch from which its weights hold. With phases, a weight may be 0 if it is above 0 in
        another phase. A share is 0 or at least one row in 65,536.
      orders: `Order`s by name. By default, a Grain dataset keeps its order, and any other source is shuffled with
        a seed of its own, which is derived from `seed`.
      seed: the seed of these orders, and of the keys that a transform gets.
      end: when an epoch ends. "endless": the only epoch has no end. "first_exhausted": once all rows of one source
        were read. "all_exhausted": once all rows of every source were read.

    Each source has its own epochs: after its last row it begins again, shuffled anew. In the next epoch of the
    mixture, each source continues where it stopped.

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
    own_order: OwnOrder = "mixture"

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        orders: Mapping[str, Order] | None = None,
        seed: int = 0,
        end: End = "endless",
    ) -> None:
        self._sources = _opened(sources)
        self._owned = [source for name, source in self._sources.items() if source is not sources[name]]
        _check_specs(self._sources)
        seed = checked_integer("seed", seed, at_least=0, at_most=(1 << 64) - 1)
        self.order = MixtureOrder(
            names=tuple(self._sources),
            lengths=tuple(map(len, self._sources.values())),
            orders=_orders_of(self._sources, orders, seed),
            phases=_phases_of(weights, self._sources),
            end=end,
            seed=seed,
        )
        self._given_phases = self.order.phases
        self._each = each = list(self._sources.values())
        self._shards = Shards(self.order.lengths)  # which source has which rows
        own = each[0].spec
        self._source_leaf = len(jax.tree.leaves([own[key] for key in sorted(own) if key < _SOURCE]))
        self.spec = {**own, _SOURCE: jax.ShapeDtypeStruct((), np.int32)}
        self.picklable = all(source.picklable for source in each)
        self.positioned = any(source.positioned for source in each)
        self.reads_columns = all(source.reads_columns for source in each)
        ragged_leaves, *others = {source.ragged_leaves for source in each}
        if not others:  # all agree, so leaves of a batch may be shorter than in `spec`
            self.ragged_leaves = tuple(leaf + (leaf >= self._source_leaf) for leaf in ragged_leaves)
        self._arrays = self._joined_arrays()

    def _joined_arrays(self) -> ArraySource | None:
        """One source for all rows, if all sources are arrays outside of stores; else None."""
        arrays = [source.arrays for source in self._sources.values()]
        return None if None in arrays else ArraySource.joined(arrays, _SOURCE)

    @property
    def arrays(self) -> ArraySource | None:
        return self._arrays

    def order_for(self, asked: Order | None) -> MixtureOrder:
        """The order of the mixture. A feed refuses any other."""
        return self.order

    def tokens_of(self, rows: Indices) -> Indices | None:
        """See `Source`. None if the number for one of these rows is unknown."""
        found = np.empty(len(rows), np.int64)
        for number, own, here in self._shards.split(rows):
            tokens = self._each[number].tokens_of(own)
            if tokens is None:
                return None
            found[here] = tokens
        return found

    def with_weights(self, weights: Mapping[str, float], position: int) -> Mixture:
        """See `Source`. Phases that begin later are kept."""
        if self.order.end != "endless":
            raise ValueError(
                f'weights of a running feed can change only with end="endless", got end="{self.order.end}"; give '
                "the weights as phases, Mixture(sources, weights=[(0, ...), (position, ...)])"
            )
        if any(phase.start == position for phase in self._given_phases):
            raise ValueError(
                f"the weights from position {position} on were given to Mixture, and a program that restores this "
                "feed would use those; pass other weights to Mixture, or call set_weights after the next batch"
            )
        new = _phase(position, weights, self._sources, f"weights from position {position} on")
        return self._with_phases([phase for phase in self.order.phases if phase.start != position] + [new])

    def with_weights_of(self, order: Any, position: int) -> Mixture:
        """See `Source`. Phases before `position` come from the state, later ones are those given to `Mixture`."""
        given_starts = {phase.start for phase in self._given_phases}
        past = [
            phase
            for phase in self._phases_of_state(order)
            if phase.start < position or (phase.start == position and position not in given_starts)
        ]
        given_past = {phase for phase in self._given_phases if phase.start < position}
        if self.order.end != "endless" or not given_past <= set(past):
            return self
        return self._with_phases(past + [phase for phase in self._given_phases if phase.start >= position])

    def _phases_of_state(self, order: Any) -> list[Phase]:
        """The phases in a state's order. Empty if they do not fit these sources. States leave out weights of 0."""
        found = []
        for start, counts in phases_of_state(order).items():
            rows = tuple(counts.get(name, 0) for name in self._sources)
            fits = counts.keys() <= self._sources.keys() and all(
                type(count) is int and count >= 0 for count in rows
            )
            if not fits or not 0 < sum(rows) <= LARGEST_BLOCK:
                return []
            found.append(Phase(start, rows))
        return found

    def _with_phases(self, phases: Sequence[Phase]) -> Mixture:
        """A mixture of the same open sources with these phases."""
        if sorted(phases) == list(self.order.phases):
            return self
        mixture = Mixture.__new__(Mixture)
        vars(mixture).update(vars(self))
        mixture.order = dataclasses.replace(self.order, phases=tuple(sorted(phases)))
        return mixture

    @property
    def identity(self) -> dict[str, Any]:
        """The identities of the sources. Weights and orders are part of the mixture's order instead."""
        sources = [[name, len(source), source.identity] for name, source in self._sources.items()]
        return {"kind": "mixture", "sources": sources}

    def check_rows(self) -> None:
        """Check the rows of all sources."""
        for number, source in enumerate(self._each):
            with self._naming(number):
                source.check_rows()

    def __len__(self) -> int:
        """The number of rows of all sources."""
        return self.order.firsts[-1]

    @property
    def epoch_rows(self) -> int:
        """The number of positions in an epoch of the mixture."""
        return self.order.rows

    @property
    def will_read(self) -> WillRead | None:
        """Fetches rows ahead, if a source lies in a store; else None."""
        return None if all(source.will_read is None for source in self._sources.values()) else self._will_read

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        parts = [(self._each[number].will_read, own) for number, own, _ in self._shards.split(rows)]
        return all(will_read(own, ahead) for will_read, own in parts if will_read is not None)

    def padded_length(self, rows: Indices) -> int:
        """The largest `padded_length` of the sources, each for its own rows."""
        return max(self._each[number].padded_length(own) for number, own, _ in self._shards.split(rows))

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`. This is one C call if all sources are arrays outside of stores."""
        if self._arrays is None:
            return super().read_ordered(order, epoch, positions, cuts)
        return self._arrays.read_ordered(order, epoch, positions, cuts)

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`. Each source gets epochs and positions in its own order, and the keys of the mixture.

        Rows of one source that are not adjacent in `rows` need a second copy.
        """
        index = indices_of(rows)
        if self._arrays is not None:
            self._arrays.read_cuts(index, cuts)
            return
        cuts_of_sources = []  # with the leaf numbers of the sources, which lack the leaf "source"
        for leaf, columns, out in cuts:
            if leaf == self._source_leaf:
                out[...] = self._shards.of(index)
            else:
                cuts_of_sources.append((leaf - (leaf > self._source_leaf), columns, out))
        for number, own, here in self._shards.split(index) if cuts_of_sources else ():
            at: Rows | Indices = own
            if isinstance(rows, Rows):
                positions = self.order.own_positions(rows.epoch[here], rows.position[here])
                at = Rows(*positions, own, rows.key[here])
            adjacent = isinstance(here, slice)
            targets = [
                (leaf, c, out[here] if adjacent else np.empty((len(own), *out.shape[1:]), out.dtype))
                for leaf, c, out in cuts_of_sources
            ]
            with self._naming(number):
                self._each[number].read_cuts(at, targets)
            for (_, _, out), (_, _, values) in zip(cuts_of_sources, targets, strict=True):
                if not adjacent:
                    out[here] = values

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """A context in which a `RowError` of a source gets the source's name and the row index in the mixture."""
        try:
            yield
        except RowError as error:
            row = None if error.row is None else error.row + self.order.firsts[number]
            message = f"{error.message} (in {self.order.names[number]!r} of the mixture)"
            raise RowError(message, stage=error.stage, row=row, file=error.file) from error.__cause__ or error

    def close(self) -> None:
        """Close the sources that were opened here. A feed does not call this: it did not open the mixture."""
        for source in self._owned:
            source.close()

    def _facts(self) -> list[tuple[str, str]]:
        of_sources = []
        for i, (name, length) in enumerate(zip(self.order.names, self.order.lengths, strict=True)):
            shares = ", then ".join(f"{phase.counts[i]:,} of {sum(phase.counts):,}" for phase in self.order.phases)
            of_sources.append((name, f"{shares}, {length:,} rows"))
        return [*super()._facts(), *of_sources]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": None}  # each process joins the arrays again

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arrays = self._joined_arrays()


def _opened(sources: Any) -> dict[str, Source]:
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources):
        raise TypeError(f'sources must be a dict by name, as in {{"web": source}}, got {repr(sources)[:100]}')
    if not sources:
        raise ValueError("a mixture must have at least one source, got none")
    found, most = {}, (1 << 62) // len(sources)  # so that the sum is an int64
    for name, given in sources.items():
        if is_stream(given):
            raise TypeError(
                f"a mixture needs sources with random access, and {name!r} is a stream; mix streams with "
                "grain.IterDataset.mix, as examples/mixture.py does"
            )
        try:
            source = as_source(given)
        except (ValueError, TypeError, OSError) as error:
            error.add_note(f"feedline: in the source {name!r} of a mixture")
            raise
        if not 0 < len(source) <= most:
            raise ValueError(
                f"each source of this mixture must have 1 to {most} rows, and {name!r} has {len(source)}; leave "
                "it out, or leave repeat() out, since a mixture repeats its sources itself"
            )
        found[name] = source
    return found


def _check_specs(sources: Mapping[str, Source]) -> None:
    """Check that all sources have the same leaves, in a dict without the key "source"."""
    (first, reference), *_ = sources.items()
    for name, source in sources.items():
        if (found := first_difference(reference.spec, source.spec, "batch")) is not None:
            leaf, expected, other = found
            raise ValueError(
                f"all sources of a mixture must have the same leaves, and {leaf} is {expected or 'missing'} in "
                f"{first!r}, {other or 'missing'} in {name!r}; store one like the other, or read only the leaves "
                "that all have: open_source(path, columns=[...])"
            )
    for name, source in sources.items():
        spec = source.spec
        if type(spec) is not dict or not all(isinstance(key, str) for key in spec) or _SOURCE in spec:
            found_keys = f"have the keys {list(spec)}" if type(spec) is dict else "are no dict"
            raise ValueError(
                f"a mixture adds a leaf {_SOURCE!r}, so rows must be a plain dict with other keys, all strings, "
                f'and the rows of {name!r} {found_keys}; name the arrays, as in {{"x": array}}, and instead of '
                "another mixture pass its sources"
            )


def _orders_of(sources: Mapping[str, Source], orders: Mapping[str, Order] | None, seed: int) -> tuple[Order, ...]:
    """The order of each source: the one in `orders`, or else its default, with a seed of its own."""
    orders = {} if orders is None else orders
    if not isinstance(orders, Mapping) or not all(isinstance(order, Order) for order in orders.values()):
        raise TypeError(f'orders must be a dict as in {{"web": feedline.Order(shuffle=False)}}, got {orders!r}')
    _check_names("orders", orders, sources, all_of_them=False)
    return tuple(
        orders.get(name) or Order(seed_of_source(seed, i), shuffle=source.shuffled)
        for i, (name, source) in enumerate(sources.items())
    )


def _phases_of(weights: Weights, sources: Mapping[str, Source]) -> tuple[Phase, ...]:
    """The phases that `weights` describes."""
    phases: Any = [(0, weights)] if isinstance(weights, Mapping) else weights
    are_pairs = isinstance(phases, list | tuple) and all(
        isinstance(phase, list | tuple) and len(phase) == 2 for phase in phases
    )
    if not are_pairs or not phases:
        raise TypeError(
            'weights must be a dict as in {"web": 0.7, "code": 0.3}, or phases of such dicts as in '
            f"[(0, {{...}}), (1_000_000, {{...}})], got {repr(weights)[:100]}"
        )
    starts = [checked_integer("weights: the position of a phase", start, at_least=0) for start, _ in phases]
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"weights: phases must begin at ascending positions, the first at 0, got {starts}; sort them"
        )
    found = [
        _phase(start, each, sources, f"weights from position {start} on" if len(phases) > 1 else "weights")
        for start, each in phases
    ]
    for i, name in enumerate(sources):
        if not any(phase.counts[i] for phase in found):
            raise ValueError(
                f"weights: the weight of {name!r} is 0, so this source would never be read; leave it out"
            )
    return tuple(found)


def _phase(start: int, weights: Any, sources: Mapping[str, Source], where: str) -> Phase:
    """The phase with these weights from a position on. Error messages begin with `where`."""
    if not isinstance(weights, Mapping):
        raise TypeError(f'{where} must be a dict as in {{"web": 0.7, "code": 0.3}}, got {repr(weights)[:100]}')
    _check_names(where, weights, sources, all_of_them=True)
    for name, weight in weights.items():
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ValueError(
                f"{where}: the weight of {name!r} must be a finite number and not negative, got {weight!r}; give "
                "a share, such as 0.3"
            )
    if not any(weights.values()):
        raise ValueError(f"{where}: one weight must be above 0, and all are 0; give a source a weight")
    return Phase(start, counts_of({name: weights[name] for name in sources}))


def _check_names(what: str, given: Mapping[str, Any], names: Mapping[str, Any], *, all_of_them: bool) -> None:
    unknown = [name for name in given if name not in names]
    missing = [name for name in names if name not in given] if all_of_them else []
    kinds = (("unknown are", unknown), ("missing are", missing))
    found = [f"{kind} {', '.join(map(repr, some))}" for kind, some in kinds if some]
    if found:
        raise ValueError(
            f"{what}: the keys must be the names of the sources, {', '.join(map(repr, names))}; {'; '.join(found)}"
        )
