"""That every row comes once an epoch, and that what is delivered is what the source holds at that index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline.audit.digest import row_digests
from feedline.audit.held import Census, Difference, Held, State, joined
from feedline.audit.places import places
from feedline.feed import Feed
from feedline.rows.row_source import RowSource
from feedline.sources.open_source import as_source
from feedline.sources.records import RecordSource

_MOST_ROWS = 1 << 23
"""Row indices that are counted, at the most: 8 bytes each."""


def census(feed: Feed, source: Any, held: Held, first: State) -> Census | Difference:
    """Count the row indices of whole epochs, and read delivered rows again, from the source, by their index.

    Args:
      feed: on one device.
      source: what it was built over.
      held: what it delivered after the state `first`.
    """
    rows = held.settings.rows
    if rows is None:
        return Census(0, 0, 0, "a stream has no row indices, so that rows come once was not shown")
    try:
        epochs = _counted(feed, held, rows) if rows <= _MOST_ROWS else 0
        compared = 0 if held.settings.transformed else _compared(feed, as_source(source), held, first)
    except Difference as difference:
        return difference
    drops = held.settings.remainder == "drop"
    told = "" if epochs else f"row indices of an epoch are counted up to {_MOST_ROWS:,} rows, here are {rows:,}"
    return Census(epochs, rows % held.settings.batch_size if drops else 0, compared, told)


def _counted(feed: Feed, held: Held, rows: int) -> int:
    """How many epochs hold each row once, out of those that were met."""
    epochs: int = min(held.states[-1]["epoch"] + 1, max(1, _MOST_ROWS // rows))
    for epoch in range(epochs):
        indices = np.concatenate(list(_foretold(feed, held, rows, epoch)))[:rows]
        times = np.bincount(indices[indices >= 0], minlength=rows)
        if times.max() > 1 or len(times) > rows:
            raise Difference(f"row {times.argmax()} of the source comes {times.max()} times in epoch {epoch}")
        if np.count_nonzero(times) < len(indices):
            raise Difference(f"row {times.argmin()} of the source does not come in epoch {epoch}")
    return epochs


def _foretold(feed: Feed, held: Held, rows: int, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """The row indices of an epoch's batches: `rows_of` knows them without reading."""
    size = held.settings.batch_size
    stop = rows - size + 1 if held.settings.remainder == "drop" else rows
    for position in range(0, stop, size):
        yield feed.rows_of({**feed.get_state(), "epoch": epoch, "position": position})


def _compared(feed: Feed, source: RowSource | Any, held: Held, first: State) -> int:
    """How many of the delivered rows are the source's own."""
    epochs, _ = places(held.settings, (0, 0), len(held.batches))
    compared = 0
    for number, (before, epoch) in enumerate(zip([first, *held.states], epochs, strict=False)):
        indices = feed.rows_of({**first, **before})
        real = np.flatnonzero(indices >= 0)
        asked = indices[real]
        if isinstance(source, RecordSource):
            asked = epoch[real] * len(source) + asked
        out = _empty(source.spec, len(real))
        source.read(asked, out)
        for path, values in jax.tree_util.tree_leaves_with_path(out):
            _compare(held, number, f"batch{jax.tree_util.keystr(path)}", values, indices)
        compared += len(real)
    return compared


def _empty(spec: Any, rows: int) -> Any:
    return jax.tree.map(lambda leaf: np.empty((rows, *leaf.shape), leaf.dtype), spec)


def _compare(held: Held, number: int, name: str, values: Any, indices: npt.NDArray[np.int64]) -> None:
    leaf = held.names.index(name)
    shape, dtype = held.forms[leaf]
    delivered = joined(held.batches[number][leaf], len(indices), shape)[indices >= 0]
    wrong = delivered != row_digests(values.astype(dtype), leaf, shape, tuple((0, size) for size in shape))
    if wrong.any():
        row = int(np.flatnonzero(indices >= 0)[wrong.argmax()])
        raise Difference(
            f"it is not row {indices[row]} of the source, which rows_of foretells",
            batch=number,
            row=row,
            leaf=name,
        )
