"""Checks that every row comes once an epoch, and that delivered rows have the values of the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.feed import Feed
from feedline._src.order.epoch import keys_at
from feedline._src.rows.row_source import Rows, RowSource, is_positioned
from feedline._src.sources.mixture import Mixture
from feedline._src.sources.open_source import as_source
from feedline._src.tools.audit.digest import row_digests
from feedline._src.tools.audit.observed import Coverage, Difference, Observed, State, combined_digests
from feedline._src.tools.audit.positions import row_positions

_MOST_ROWS = 1 << 23
"""The largest number of row indices that are counted: they take 8 bytes each."""


def measure_coverage(feed: Feed, source: Any, observed: Observed, first: State) -> Coverage | Difference:
    """Count the row indices of whole epochs, and compare delivered rows with those of the source.

    Args:
      feed: on one device.
      source: the source of the feed.
      observed: what the feed delivered after the state `first`.
    """
    rows = observed.settings.rows
    if rows is None:
        return Coverage(0, 0, 0, "a stream has no row indices, so that rows come once was not shown")
    try:
        compared = 0 if observed.settings.transformed else _compared(feed, as_source(source), observed, first)
        if isinstance(source, Mixture):
            source_epochs = _counted_by_source(feed, observed, source)
            return Coverage(0, 0, compared, "" if source_epochs else "no source was counted whole", source_epochs)
        epochs = _counted(feed, observed, rows) if rows <= _MOST_ROWS else 0
    except Difference as difference:
        return difference
    drops = observed.settings.remainder == "drop"
    left_out = rows % observed.settings.batch_size if drops else 0
    limit = f"row indices of an epoch are counted up to {_MOST_ROWS:,} rows, here are {rows:,}"
    return Coverage(epochs, left_out, compared, not_shown="" if epochs else limit)


def _counted(feed: Feed, observed: Observed, rows: int) -> int:
    """How many of the epochs that the feed visited were counted; a `Difference` if one is wrong."""
    epochs: int = min(observed.states[-1]["epoch"] + 1, max(1, _MOST_ROWS // rows))
    for epoch in range(epochs):
        indices = np.concatenate(list(_row_indices(feed, observed, rows, epoch)))[:rows]
        times = np.bincount(indices[indices >= 0], minlength=rows)
        if times.max() > 1 or len(times) > rows:
            raise Difference(f"row {times.argmax()} of the source comes {times.max()} times in epoch {epoch}")
        if np.count_nonzero(times) < len(indices):
            raise Difference(f"row {times.argmin()} of the source does not come in epoch {epoch}")
    return epochs


def _counted_by_source(feed: Feed, observed: Observed, source: Mixture) -> int:
    """How many epochs of the sources of a mixture were counted; a `Difference` if one is wrong.

    Of the first epoch of the mixture as many rows are counted as all sources have, twice.
    """
    rows = min(source.order.rows, 2 * len(source), _MOST_ROWS)
    indices = np.concatenate(list(_row_indices(feed, observed, rows, 0)))[:rows]
    epochs = 0
    for name, first, length in zip(source.order.names, source.order.firsts, source.order.lengths, strict=False):
        own = indices[(indices >= first) & (indices < first + length)] - first
        for epoch, counted in enumerate(own[: len(own) // length * length].reshape(-1, length)):
            times = np.bincount(counted, minlength=length)
            if times.max() > 1:
                raise Difference(
                    f"row {times.argmax()} of {name!r} comes {times.max()} times in epoch {epoch} of that source"
                )
            epochs += 1
    return epochs


def _row_indices(feed: Feed, observed: Observed, rows: int, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """The row indices of an epoch's batches, from `rows_of`, which reads no data."""
    size = observed.settings.batch_size
    stop = rows - size + 1 if observed.settings.remainder == "drop" else rows
    for position in range(0, stop, size):
        yield feed.rows_of({**feed.get_state(), "epoch": epoch, "position": position})


def _compared(feed: Feed, source: RowSource | Any, observed: Observed, first: State) -> int:
    """How many delivered rows have the values of the source; a `Difference` if one has not."""
    epochs, positions = row_positions(observed.settings, (0, 0), len(observed.batches))
    compared = 0
    for number, (before, epoch, position) in enumerate(
        zip([first, *observed.states], epochs, positions, strict=False)
    ):
        indices = feed.rows_of({**first, **before})
        real = np.flatnonzero(indices >= 0)
        out = _empty(source.spec, len(real), observed, number)
        if is_positioned(source):
            source.read_positioned(_rows(feed, epoch[real], position[real], indices[real]), out)
        else:
            source.read(indices[real], out)
        for path, values in jax.tree_util.tree_leaves_with_path(out):
            _compare(observed, number, f"batch{jax.tree_util.keystr(path)}", values, indices)
        compared += len(real)
    return compared


def _rows(feed: Feed, epochs: Any, positions: Any, indices: Any) -> Rows:
    """What a source is told of these rows."""
    order = feed.order
    assert order is not None
    keys = [keys_at(order.seed, int(e), np.array([p]))[0] for e, p in zip(epochs, positions, strict=True)]
    return Rows(epochs, positions, indices, np.array(keys, np.uint64))


def _empty(spec: Any, rows: int, observed: Observed, number: int) -> Any:
    """Arrays for so many rows, in the shapes of batch `number`."""

    def leaf(path: Any, of_source: Any) -> npt.NDArray[Any]:
        shards = observed.batches[number][observed.names.index(f"batch{jax.tree_util.keystr(path)}")]
        return np.empty((rows, *shards[0].shape), of_source.dtype)

    return jax.tree_util.tree_map_with_path(leaf, spec)


def _compare(observed: Observed, number: int, name: str, values: Any, indices: npt.NDArray[np.int64]) -> None:
    leaf = observed.names.index(name)
    _, dtype = observed.row_specs[leaf]
    shape = values.shape[1:]
    delivered = combined_digests(observed.batches[number][leaf], len(indices))[indices >= 0]
    wrong = delivered != row_digests(values.astype(dtype), leaf, shape, tuple((0, size) for size in shape))
    if wrong.any():
        row = int(np.flatnonzero(indices >= 0)[wrong.argmax()])
        raise Difference(
            f"it is not row {indices[row]} of the source, which rows_of returns for it",
            batch=number,
            row=row,
            leaf=name,
        )
