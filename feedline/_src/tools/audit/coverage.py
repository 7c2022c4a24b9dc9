"""Checks on one device that each row occurs once per epoch, and that delivered rows have the source's values."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.feed import Feed
from feedline._src.listen.words import counted
from feedline._src.order.epoch import keys_at
from feedline._src.rows.source import Rows
from feedline._src.sources.as_source import as_source
from feedline._src.tools.audit.digest import whole_row_digests
from feedline._src.tools.audit.verdict import (
    PLACES_PER_EPOCH,
    Difference,
    Observed,
    Settings,
    batch_starts,
    row_places,
)

_MAX_ROWS = 1 << 23
"""At most this many row indices are counted, because each counter takes 8 bytes."""


def measure_coverage(feed: Feed, observed: Observed) -> Observed:
    """Compare the first rows delivered on one device with the source, and count the row indices of whole epochs.

    Adds to `observed` what is covered and what is not, and returns `observed`. Raises `Difference` if the feed
    delivers other rows or other indices than expected.
    """
    settings, covered, not_covered = observed.settings, observed.covered, observed.not_covered
    if settings.rows is None:
        not_covered.append("that each row comes once, since a stream has no row indices")
        return observed
    if not settings.transformed and feed.options.reading.bad_rows != "raise":
        not_covered.append("that rows equal the source's, since Reading(bad_rows=...) may replace them")
    elif not settings.transformed:
        compared = _compare(feed, observed)
        covered.append(f"{compared:,} rows delivered on one device equal the rows of the source at their indices.")
    if as_source(feed.options.source).own_order == "mixture":
        not_covered.append("that each row comes once, since in a mixture each source has its own epochs")
        return observed
    epochs, rows = observed.states[-1]["epoch"] + 1, settings.rows
    if epochs * rows > _MAX_ROWS:
        not_covered.append(
            f"that each of {rows:,} rows comes once, since at most {_MAX_ROWS:,} row indices are counted"
        )
        return observed
    left_out = int((_count(feed, settings, rows, epochs) == 0).sum())
    without = f"; remainder {settings.remainder!r} leaves out {left_out:,} in all" if left_out else ""
    covered.append(f"{counted(epochs, 'epoch')} of {rows:,} rows: each row index comes once per epoch{without}.")
    return observed


def _count(feed: Feed, settings: Settings, rows: int, epochs: int) -> npt.NDArray[np.int64]:
    """int64[epochs, rows]: how often `Feed.rows_of`, which reads no data, returns each row index in each epoch.

    Raises `Difference` if a batch has unexpected indices, or an index occurs twice in an epoch. The starts of the
    batches are computed without the feed.
    """
    times = np.zeros((epochs, rows), np.int64)
    state = feed.get_state()
    for start in itertools.takewhile(lambda start: start < (epochs, 0), batch_starts(settings)):
        epoch, position = np.divmod(row_places(settings, start, 1)[0], PLACES_PER_EPOCH)
        found = feed.rows_of({**state, "epoch": start[0], "position": start[1]})
        real = position < rows
        if len(found) != len(real) or ((found >= 0) != real).any() or (found >= rows).any():
            raise Difference(f"the batch at epoch {start[0]}, position {start[1]} has unexpected row indices")
        counted_here = real & (epoch < epochs)  # with "wrap", a batch may reach into the next epoch
        np.add.at(times, (epoch[counted_here], found[counted_here]), 1)
    for epoch, row in np.argwhere(times > 1)[:1]:
        raise Difference(f"row {row} of the source comes {times[epoch, row]} times in epoch {epoch}")
    return times


def _compare(feed: Feed, observed: Observed) -> int:
    """Compare delivered rows with the source, and return their number. `Difference`: a row has other values."""
    source = as_source(feed.options.source)
    delivered, state = list(observed.settings.leaves), feed.get_state()
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
            wrong = observed.digests[number][leaf][0, real] != digests
            if wrong.any():
                row = int(real[wrong.argmax()])
                found = f"rows_of says that it is row {indices[row]} of the source, but it has other values"
                raise Difference(found, batch=number, row=row, leaf=delivered[leaf])
        compared += len(real)
    return compared


def _rows(feed: Feed, places: npt.NDArray[np.int64], indices: Any) -> Rows:
    """The rows with their epochs, positions and keys, because the rows of some sources depend on these."""
    order = feed.order
    assert order is not None
    epochs, positions = np.divmod(places, PLACES_PER_EPOCH)
    keys = [keys_at(order.seed, int(e), np.array([p]))[0] for e, p in zip(epochs, positions, strict=True)]
    return Rows(epochs, positions, indices, np.array(keys, np.uint64))
