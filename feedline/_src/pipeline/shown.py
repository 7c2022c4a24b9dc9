"""The read-only properties of a feed, and its `repr` in a terminal and in a notebook."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from feedline._src.feed_options import FeedOptions
from feedline._src.options import Order, Reading
from feedline._src.order.schedule import Remainder
from feedline._src.pipeline.stages import Stages

if TYPE_CHECKING:
    from feedline._src.order.mixture import MixtureOrder

_LEAVES = 12
"""So many are shown, at the most."""


class Shown:
    """The part of `Feed` that only reads. It works from any thread and on a closed feed, and never blocks."""

    _stages: Stages
    _options: FeedOptions
    _delivered: Any
    _closed: bool

    @property
    def _next_stages(self) -> Stages:
        """The stages of the next batch, which may have another size than the last one."""
        return self._stages.at(self._delivered.step)

    @property
    def options(self) -> FeedOptions:
        """What the feed was asked for."""
        return self._options

    @property
    def batch_size(self) -> int:
        """Rows in the next global batch."""
        return self._next_stages.access.batch_size

    @property
    def order(self) -> Order | MixtureOrder | None:
        """Of the rows. `Order(shuffle=False)`: the source's own, as Grain datasets keep it. None: a stream's."""
        order = self._stages.access.order
        return None if order is None else order.shown

    @property
    def epochs(self) -> int | None:
        """Of one pass; None: endless."""
        return self._options.epochs

    @property
    def remainder(self) -> Remainder:
        """What becomes of rows that do not fill a batch: "drop", "pad" or "wrap"."""
        return self._options.remainder

    @property
    def reading(self) -> Reading:
        """The reading options, with the numbers of threads, workers and buffers that are in use now."""
        threads, workers, buffer, _ = self._stages.settings
        return dataclasses.replace(self._stages.reading, threads=threads, workers=workers, buffer=buffer)

    @property
    def prefetch(self) -> int:
        """Placed batches that wait, at the most; 0: synchronous. The number that is in use now."""
        return self._stages.settings.prefetch

    @property
    def steps_per_call(self) -> int:
        """Batches that `next` gives at once."""
        return self._options.steps_per_call

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {fact}" for name, fact in self._facts())
        return f"<feedline.Feed: {facts or 'not built'}>"

    def _repr_html_(self) -> str:
        """Two tables for a notebook: settings and position, and the spec of a batch."""
        from feedline._src.notebook import table

        facts = self._facts()[:-1]
        if not facts:
            return table("feedline.Feed: not built", [])
        threads, workers, buffer, prefetch = self._stages.settings
        settings = [
            ("prefetch", f"{prefetch:,}"),
            ("reading", f"threads {threads}, workers {workers}, buffer {buffer}"),
        ]
        leaves = jax.tree_util.tree_leaves_with_path(self._next_stages.placement.spec)
        spec = [(_name(path), leaf.dtype.name, f"{leaf.shape}", _layout(leaf)) for path, leaf in leaves[:_LEAVES]]
        if len(leaves) > _LEAVES:
            spec.append((f"and {len(leaves) - _LEAVES} more", "", "", ""))
        return table("feedline.Feed", [*facts, *settings]) + table(
            "feedline.Feed.spec", spec, ("leaf of a batch", "dtype", "global shape", "sharding")
        )

    def _facts(self) -> list[tuple[str, str]]:
        """Names and values, in words. Of a feed that could not be built there are none."""
        if "_pipelines" not in vars(self):
            return []
        fingerprint, cursor = (
            self._stages.fingerprint,
            self._next_stages.access.next_cursor(self._delivered.cursor),
        )
        rows = fingerprint["rows"]
        return [
            ("rows", f"of {fingerprint['format']}" if rows is None else f"{rows:,}"),
            ("batch_size", f"{self.batch_size:,}"),
            ("remainder", self.remainder),
            ("epochs", "endless" if self.epochs is None else f"{self.epochs:,}"),
            ("order", "its own" if self.order is None else repr(self.order)),
            ("epoch", f"{cursor.epoch:,}"),
            ("position", f"{cursor.position:,}" + (", closed" if self._closed else "")),
            ("spec", _described(self._next_stages.placement.spec)),
        ]


def _described(spec: Any) -> str:
    """The leaves of a batch, as in ``image: uint8[64, 28, 28], label: int32[64]``."""
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    named = [f"{_name(path)}: {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves[:_LEAVES]]
    return ", ".join([*named, f"and {len(leaves) - _LEAVES} more"] if len(leaves) > _LEAVES else named)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "batch"


def _layout(leaf: jax.ShapeDtypeStruct) -> str:
    """How a leaf is sharded; of another sharding than `NamedSharding`, its class."""
    sharding = leaf.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return type(sharding).__name__
    mesh = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    return f"P({', '.join(map(repr, sharding.spec))}) on Mesh({mesh})"
