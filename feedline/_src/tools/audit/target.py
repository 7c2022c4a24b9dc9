"""Turns the command line's target, a function of the user's or a path, into a function that makes a feed."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.feed import Feed
from feedline._src.sources.open_source import open_arrays
from feedline._src.tools.cli.options import is_name, load_name

MakeFeed = Callable[[Mesh], Feed]
_EPOCH_BATCHES = 8
_BATCH_ELEMENTS = 1 << 20


def load_make_feed(target: str, devices: int) -> MakeFeed:
    """The function that `module:function` names, or a function that makes a feed of all leaves of a path or glob.

    Raises:
      ImportError, AttributeError: there is no such function.
      ValueError: there are too few rows.
    """
    if is_name(target):
        return load_name(target)  # type: ignore[no-any-return]
    size = _size_of_batch(target, devices)
    return lambda mesh: Feed(target, size, NamedSharding(mesh, PartitionSpec("data")))


def _size_of_batch(path: str, devices: int) -> int:
    """A multiple of `devices`: about an eighth of the rows, and at most about a million numbers in a batch."""
    source = open_arrays(path)
    rows, leaves = len(source), jax.tree.leaves(source.spec)
    source.close()
    if rows < 2 * devices:
        raise ValueError(
            f"this audit divides batches among {devices} devices and needs at least {2 * devices} rows, {path} "
            f"has {rows}; audit more rows, or fewer processes, as in --processes 1,2"
        )
    row = sum(math.prod(leaf.shape) for leaf in leaves)
    fitting: int = max(1, min(rows // _EPOCH_BATCHES, _BATCH_ELEMENTS // max(1, row)) // devices) * devices
    return fitting
