"""Checks on one device that every row comes once an epoch, and that delivered rows have the source's values."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.feed import Feed
from feedline._src.order.epoch import keys_at
from feedline._src.rows.row_source import Rows, is_positioned
from feedline._src.sources.mixture import Mixture
from feedline._src.sources.open_source import as_source
from feedline._src.tools.audit.digest import whole_row_digests
from feedline._src.tools.audit.verdict import Coverage, Difference, Observed, Settings, State, row_positions

_MAX_ROWS = 1 << 23
"""The largest number of row indices that are counted, which take 8 bytes each."""


def measure_coverage(feed: Feed, observed: Observed, first: State) -> Coverage | Difference:
    """Compare delivered rows with those of the source, and count the row indices of whole epochs.

    Args:
      feed: on one device.
      observed: what the feed delivered after the state `first`.
    """
    source, settings = feed.options.source, observed.settings
    rows, size = settings.rows, settings.batch_size
    if rows is None:
        return Coverage(not_shown=("a stream has no row indices, so that rows come once was not shown",))
    replaces = feed.options.reading.bad_rows != "raise"
    visited = observed.states[-1]["epoch"] + 1
    not_shown: list[str] = []
    try:
        compared = 0 if settings.transformed or replaces else _compare(feed, as_source(source), observed, first)
        if isinstance(source, Mixture):
            left_out, epochs = 0, _count_sources(feed, observed, source)
            if not epochs:
                not_shown.append("no source was counted whole")
            counted = "of the mixture's sources: by their indices each row of the source comes once."
        else:
            left_out = _left_out(settings, settings.epochs - 1 if settings.epochs else 0)
            epochs = _count_epochs(feed, observed, min(visited, _MAX_ROWS // rows))
            if epochs < visited:
                not_shown.append(
                    f"{visited - epochs} of {visited} epochs of {rows:,} rows were not counted: an audit counts "
                    f"whole epochs of at least one batch, and of at most {_MAX_ROWS:,} rows together"
                )
            counted = f"of {rows:,} rows: by their indices each row comes once"
            where = "the last of a pass" if settings.remainder == "wrap" else "each"
            counted += f"; batches of {size} leave out {left_out} of {where}." if left_out else "."
    except Difference as difference:
        return difference
    if replaces and not settings.transformed:
        not_shown.append("rows were not compared with the source, since Reading(bad_rows=...) may replace them")
    shown = [f"{epochs} epoch{'s' if epochs > 1 else ''} {counted}"] if epochs else []
    if compared:
        shown.append(f"{compared:,} rows delivered on one device are what the source holds at their index.")
    return Coverage(epochs, left_out, compared, tuple(shown), tuple(not_shown))


def _left_out(settings: Settings, epoch: int) -> int:
    """Rows of this epoch that no batch holds: with "wrap" those after the last whole batch of a pass."""
    rows, epochs = settings.rows, settings.epochs
    assert rows is not None
    if settings.remainder == "drop":
        return rows % settings.batch_size
    if settings.remainder == "wrap" and epochs and (epoch + 1) % epochs == 0:
        return rows * epochs % settings.batch_size
    return 0


def _count_epochs(feed: Feed, observed: Observed, epochs: int) -> int:
    """Count the row indices of the first `epochs` epochs: in each, the rows that it delivers come once."""
    rows = observed.settings.rows
    assert rows is not None
    if observed.settings.remainder == "wrap" and rows < observed.settings.batch_size:
        return 0  # a batch holds several epochs
    for epoch in range(epochs):
        end = rows - _left_out(observed.settings, epoch)
        indices = _row_indices(feed, observed, end, epoch)
        if len(indices) != end:
            raise Difference(f"{len(indices)} rows of the source come in epoch {epoch}, not {end}")
        _check_distinct(indices, rows, "the source", f"epoch {epoch}")
    return epochs


def _count_sources(feed: Feed, observed: Observed, mixture: Mixture) -> int:
    """How many epochs of a mixture's sources were counted, from the mixture's first rows."""
    order = mixture.order
    indices = _row_indices(feed, observed, min(order.rows, 2 * len(mixture), _MAX_ROWS), 0)
    epochs = 0
    for name, first, length in zip(order.names, order.firsts, order.lengths, strict=False):
        own = indices[(indices >= first) & (indices < first + length)] - first
        for epoch, counted in enumerate(own[: len(own) // length * length].reshape(-1, length)):
            _check_distinct(counted, length, repr(name), f"epoch {epoch} of that source")
            epochs += 1
    return epochs


def _check_distinct(indices: npt.NDArray[np.int64], rows: int, source: str, epoch: str) -> None:
    times = np.bincount(indices, minlength=rows)
    if times.max() > 1 or len(times) > rows:
        raise Difference(f"row {times.argmax()} of {source} comes {times.max()} times in {epoch}")


def _row_indices(feed: Feed, observed: Observed, end: int, epoch: int) -> npt.NDArray[np.int64]:
    """The row indices of an epoch's positions before `end`, from `rows_of`, which reads no data."""
    size, rows = observed.settings.batch_size, observed.settings.rows
    assert rows is not None
    state = feed.get_state()

    def at(position: int) -> npt.NDArray[np.int64]:
        place = (epoch, position) if position >= 0 else (epoch - 1, rows + position)
        return feed.rows_of({**state, "epoch": place[0], "position": place[1]})

    batches = [at(position) for position in range(0, end - size + 1, size)]
    if end % size and observed.settings.remainder == "pad":
        batches.append(at(end - end % size))
    elif end % size:  # of the batch that ends there, since the pass may have no room for one that begins
        batches.append(at(end - size)[-(end % size) :])
    indices = np.concatenate(batches)
    return indices[indices >= 0]


def _compare(feed: Feed, source: Any, observed: Observed, first: State) -> int:
    """How many delivered rows have the values of the source; a `Difference` if one has not."""
    delivered = list(observed.leaves)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(feed.spec)]
    paths, tree = jax.tree_util.tree_flatten_with_path(source.spec)
    leaves = [delivered.index(f"batch{jax.tree_util.keystr(path)}") for path, _ in paths]
    epochs, positions = row_positions(observed.settings, (0, 0), len(observed.digests))
    compared = 0
    for number, before in enumerate([first, *observed.states[:-1]]):
        indices = feed.rows_of({**first, **before})
        real = np.flatnonzero(indices >= 0)
        arrays = [
            np.empty((len(real), *observed.shapes[number][leaf]), spec.dtype)
            for leaf, (_, spec) in zip(leaves, paths, strict=True)
        ]
        if is_positioned(source):
            rows = _rows(feed, epochs[number][real], positions[number][real], indices[real])
            source.read_positioned(rows, jax.tree.unflatten(tree, arrays))
        else:
            source.read(indices[real], jax.tree.unflatten(tree, arrays))
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


def _rows(feed: Feed, epochs: Any, positions: Any, indices: Any) -> Rows:
    """The places of these rows, by which a positioned source reads them."""
    order = feed.order
    assert order is not None
    keys = [keys_at(order.seed, int(e), np.array([p]))[0] for e, p in zip(epochs, positions, strict=True)]
    return Rows(epochs, positions, indices, np.array(keys, np.uint64))
