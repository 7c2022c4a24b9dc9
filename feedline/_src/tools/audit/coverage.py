"""Checks on one device that every row comes once an epoch, and that delivered rows have the source's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.feed import Feed
from feedline._src.listen.words import counted
from feedline._src.order.epoch import keys_at
from feedline._src.rows.row_source import Rows
from feedline._src.sources.as_source import as_source
from feedline._src.tools.audit.digest import whole_row_digests
from feedline._src.tools.audit.verdict import (
    PLACES_PER_EPOCH,
    Difference,
    Observed,
    Settings,
    batch_starts,
    row_counts,
    row_places,
)

_MAX_ROWS = 1 << 23
"""The largest number of row indices that are counted, which take 8 bytes each."""


def measure_coverage(feed: Feed, observed: Observed) -> dict[str, Any] | Difference:
    """Compare delivered rows with those of the source, and count the row indices of whole epochs.

    Args:
      feed: on one device.
      observed: what the feed delivered from its beginning.

    Returns:
      What `row_counts` returns; or how the feed differs from its source.
    """
    settings = observed.settings
    if settings.rows is None:
        return row_counts(not_covered="a stream has no row indices, so that rows come once was not shown")
    try:
        compared = _compare(feed, observed)
        parts = as_source(feed.options.source).parts
        if parts:
            found = _count_sources(feed, settings, parts)
        else:
            found = _count_epochs(feed, settings, settings.rows, observed.states[-1]["epoch"] + 1)
    except Difference as difference:
        return difference
    found["rows_compared_with_source"] = compared
    if compared:
        found["covered"].append(
            f"{compared:,} rows delivered on one device are what the source holds at their index."
        )
    elif not settings.transformed:
        found["not_covered"].append(
            "rows were not compared with the source, since Reading(bad_rows=...) may replace them"
        )
    return found


def _count_epochs(feed: Feed, settings: Settings, rows: int, visited: int) -> dict[str, Any]:
    """Count the row indices of the first epochs: in each, every row that batches deliver comes once."""
    size, epochs = settings.batch_size, min(visited, _MAX_ROWS // rows)
    indices, of_epoch = _row_indices(feed, settings, (epochs, 0))
    _check_distinct(indices, of_epoch, rows, "the source")
    left_out = {"drop": rows, "wrap": rows * (settings.epochs or 0), "pad": 0}[settings.remainder] % size
    where = "the last of a pass" if settings.remainder == "wrap" else "each"
    without = f"; batches of {size} leave out {left_out} of {where}" if left_out else ""
    return row_counts(
        epochs,
        left_out,
        f"{counted(epochs, 'epoch')} of {rows:,} rows: by their indices each row comes once{without}."
        if epochs
        else "",
        f"{visited - epochs} of {visited} epochs of {rows:,} rows were not counted: an audit counts at most "
        f"{_MAX_ROWS:,} row indices"
        if epochs < visited
        else "",
    )


def _count_sources(feed: Feed, settings: Settings, parts: Mapping[str, range]) -> dict[str, Any]:
    """Count the row indices of whole epochs of a mixture's sources, from the mixture's first rows."""
    epochs, total = 0, sum(map(len, parts.values()))
    indices, _ = _row_indices(feed, settings, (0, min(settings.rows or 0, 2 * total, _MAX_ROWS)))
    for name, rows in parts.items():
        length = len(rows)
        own = indices[(indices >= rows.start) & (indices < rows.stop)] - rows.start
        own = own[: len(own) // length * length]
        _check_distinct(own, np.arange(len(own)) // length, length, repr(name), " of that source")
        epochs += len(own) // length
    if not epochs:
        return row_counts(left_out=0, not_covered="no source was counted whole")
    once = (
        f"{counted(epochs, 'epoch')} of the mixture's sources: by their indices each row of the source comes once."
    )
    return row_counts(epochs, 0, once)


def _row_indices(
    feed: Feed, settings: Settings, end: tuple[int, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row index and epoch of all rows of the batches that begin before `end`, (epoch, position).

    The indices are those of `rows_of`, which reads no data; where batches begin, and which of their rows are
    padding, is computed without the feed.
    """
    state, indices, epochs = feed.get_state(), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in batch_starts(settings):
        if start >= end:
            break
        epoch, position = np.divmod(row_places(settings, start, 1)[0], PLACES_PER_EPOCH)
        found = feed.rows_of({**state, "epoch": start[0], "position": start[1]})
        real = position < (settings.rows or 0)
        if len(found) != len(real) or ((found >= 0) != real).any():
            raise Difference(f"the batch at epoch {start[0]}, position {start[1]} has another number of rows")
        indices.append(found[real])
        epochs.append(epoch[real])
    return np.concatenate(indices), np.concatenate(epochs)


def _check_distinct(
    indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64], rows: int, source: str, of: str = ""
) -> None:
    """Check that each epoch has each row at most once."""
    times = np.bincount(epochs * rows + indices, minlength=1)
    if times.max() > 1 or (indices >= rows).any():
        epoch, row = divmod(int(times.argmax()), rows)
        raise Difference(f"row {row} of {source} comes {times.max()} times in epoch {epoch}{of}")


def _compare(feed: Feed, observed: Observed) -> int:
    """How many delivered rows have the values of the source; a `Difference` if one has not."""
    if observed.settings.transformed or feed.options.reading.bad_rows != "raise":
        return 0
    source = as_source(feed.options.source)
    delivered, state = list(observed.leaves), feed.get_state()
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(feed.spec)]
    paths, tree = jax.tree_util.tree_flatten_with_path(source.spec)
    leaves = [delivered.index(f"batch{jax.tree_util.keystr(path)}") for path, _ in paths]
    places = row_places(observed.settings, (0, 0), len(observed.digests))
    compared = 0
    for number, before in enumerate([{"step": 0, "epoch": 0, "position": 0}, *observed.states[:-1]]):
        indices = feed.rows_of({**state, **before})
        real = np.flatnonzero(indices >= 0)
        arrays = [
            np.empty((len(real), *observed.shapes[number][leaf]), spec.dtype)
            for leaf, (_, spec) in zip(leaves, paths, strict=True)
        ]
        rows = _rows(feed, places[number][real], indices[real])
        source.read_positioned(rows, jax.tree.unflatten(tree, arrays))
        for leaf, values in zip(leaves, arrays, strict=True):
            digests = whole_row_digests(values.astype(dtypes[leaf]), leaf)
            (on_device,) = observed.digests[number][leaf].values()
            wrong = on_device[real] != digests
            if wrong.any():
                row = int(real[wrong.argmax()])
                found = f"it is not row {indices[row]} of the source, which rows_of returns for it"
                raise Difference(found, batch=number, row=row, leaf=delivered[leaf])
        compared += len(real)
    return compared


def _rows(feed: Feed, places: Any, indices: Any) -> Rows:
    """How a positioned source is asked for these rows."""
    order = feed.order
    assert order is not None
    epochs, positions = np.divmod(places, PLACES_PER_EPOCH)
    keys = [keys_at(order.seed, int(e), np.array([p]))[0] for e, p in zip(epochs, positions, strict=True)]
    return Rows(epochs, positions, indices, np.array(keys, np.uint64))
