"""Checks of what `Mixture` is given: its sources, their specs, orders and weights."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from feedline._src.options import Order, checked_integer
from feedline._src.order.apportionment import counts_of
from feedline._src.order.mixture import seed_of_source
from feedline._src.order.phases import Phase
from feedline._src.rows.source import Source
from feedline._src.sources.lanes import is_stream
from feedline._src.sources.open_source import as_source

Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
"""By name; or phases of them, each with the position from which on it holds."""
SOURCE = "source"
"""The key of the leaf that says which source a row is from."""


def opened(sources: Any) -> dict[str, Source]:
    """The sources by name, those of paths and arrays opened.

    Raises:
      TypeError: it is no mapping of names, or one of them has no random access.
      ValueError: there is none, or one has no rows.
    """
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources):
        raise TypeError(f'sources must be a dict by name, as in {{"web": source}}, got {repr(sources)[:100]}')
    if not sources:
        raise ValueError("a mixture must have at least one source, got none")
    found = {}
    for name, given in sources.items():
        try:
            if is_stream(given):
                raise TypeError(
                    f"a mixture needs sources with random access, and {name!r} is a stream; mix streams with "
                    "grain.IterDataset.mix, as in docs/streams.md"
                )
            source = as_source(given)
        except (ValueError, TypeError, OSError) as error:
            error.add_note(f"feedline: in the source {name!r} of a mixture")
            raise
        if not 0 < len(source) < 1 << 62:
            change = (
                "leave it out" if not len(source) else "a mixture repeats its sources itself: leave repeat() out"
            )
            raise ValueError(
                f"each source of a mixture must have 1 to 2^62 rows, and {name!r} has {len(source)}; {change}"
            )
        found[name] = source
    return found


def check_specs(sources: Mapping[str, Source]) -> None:
    """All sources have the same leaves, as a dict that has room for the leaf "source".

    Raises:
      ValueError: they do not; the message names two sources, the leaf and both specs.
    """
    (first, reference), *others = ((name, _leaves(source.spec)) for name, source in sources.items())
    for name, leaves in others:
        for leaf in sorted({*reference, *leaves}):
            if reference.get(leaf) != leaves.get(leaf):
                raise ValueError(
                    f"all sources of a mixture must have the same leaves, and {leaf} is "
                    f"{reference.get(leaf, 'missing')} in {first!r}, {leaves.get(leaf, 'missing')} in {name!r}; "
                    "store one like the other, or read only what all have: open_source(path, columns=[...])"
                )
    for name, source in sources.items():
        spec = source.spec
        kind = "one array" if isinstance(spec, jax.ShapeDtypeStruct) else f"a {type(spec).__name__}"
        if type(spec) is not dict or not all(isinstance(key, str) for key in spec):
            raise ValueError(
                f"a mixture adds a leaf {SOURCE!r}, so rows must be a plain dict with strings as keys, and those "
                f'of {name!r} are {kind}; name the arrays, as in {{"x": array}}'
            )
        if SOURCE in spec:
            change = "pass the sources of that mixture" if source.parts else "give that leaf another name"
            raise ValueError(
                f"a mixture adds a leaf {SOURCE!r}, and the rows of {name!r} have one already; {change}"
            )


def orders_of(sources: Mapping[str, Source], orders: Mapping[str, Order] | None, seed: int) -> tuple[Order, ...]:
    """The order of each source: that of `orders`; else its default, with a seed of its own."""
    orders = {} if orders is None else orders
    if not isinstance(orders, Mapping) or not all(isinstance(order, Order) for order in orders.values()):
        raise TypeError(f'orders must be a dict as in {{"web": feedline.Order(shuffle=False)}}, got {orders!r}')
    _check_names("orders", orders, sources, all_of_them=False)
    return tuple(
        orders.get(name) or Order(seed_of_source(seed, i), shuffle=source.shuffled)
        for i, (name, source) in enumerate(sources.items())
    )


def phases_of(weights: Weights, sources: Mapping[str, Source]) -> tuple[Phase, ...]:
    """The phases that `weights` describes.

    Raises:
      ValueError, TypeError: names are missing or unknown, a weight or a position is wrong, or a source is never
        read.
    """
    phases = [(0, weights)] if isinstance(weights, Mapping) else _checked_phases(weights)
    for start, each in phases:
        where = f"weights from position {start} on" if len(phases) > 1 else "weights"
        _check_names(where, each, sources, all_of_them=True)
        for name, weight in each.items():
            _check_weight(f"{where}: that of {name!r}", weight)
        if not any(each.values()):
            raise ValueError(f"{where}: one of them must be above 0, and all are 0; give a source a weight")
    for name in sources:
        if not any(each[name] for _, each in phases):
            raise ValueError(f"weights: that of {name!r} is 0, so it would never be read; leave the source out")
    return tuple(Phase(start, counts_of({name: each[name] for name in sources})) for start, each in phases)


def _checked_phases(weights: Any) -> list[tuple[int, Mapping[str, float]]]:
    pairs = list(weights) if isinstance(weights, list | tuple) else []
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            'weights must be a dict as in {"web": 0.7, "code": 0.3}, or phases of them as in '
            f"[(0, {{...}}), (1_000_000, {{...}})], got {repr(weights)[:100]}"
        )
    starts = [checked_integer("weights: the position of a phase", start, at_least=0) for start, _ in pairs]
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"weights: phases must begin at ascending positions, the first at 0, got {starts}; sort them"
        )
    for _, each in pairs:
        if not isinstance(each, Mapping):
            raise TypeError(f'weights: a phase must be a position and a dict as in {{"web": 0.7}}, got {each!r}')
    return [(start, cast(Mapping[str, float], each)) for start, (_, each) in zip(starts, pairs, strict=True)]


def _check_weight(what: str, weight: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"{what} must be a number, got {weight!r}")
    if not (math.isfinite(weight) and float(weight) >= 0):
        raise ValueError(f"{what} must be finite and not negative, got {weight}; give a share, such as 0.3")


def _check_names(what: str, given: Mapping[str, Any], names: Mapping[str, Any], *, all_of_them: bool) -> None:
    unknown = [name for name in given if name not in names]
    missing = [name for name in names if name not in given] if all_of_them else []
    if unknown or missing:
        found = [
            f"{kind} {', '.join(map(repr, of))}"
            for kind, of in (("unknown are", unknown), ("missing are", missing))
            if of
        ]
        raise ValueError(
            f"{what}: the names must be those of the sources, {', '.join(map(repr, names))}; {'; '.join(found)}"
        )


def _leaves(spec: Any) -> dict[str, str]:
    """The dtype and shape of each leaf; of a foreign byte order, that too."""
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    return {
        f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype if leaf.dtype.isnative else leaf.dtype.str}"
        f"{list(leaf.shape)}"
        for path, leaf in leaves
    }
