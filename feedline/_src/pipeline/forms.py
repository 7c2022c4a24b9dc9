"""What follows from the options of a feed and the spec of a row: what this process supplies, and its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from feedline._src.cluster.cores import own_cores
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.form import LocalForm, transformed_spec
from feedline._src.options import Settings
from feedline._src.placement.place import Placement, with_steps
from feedline._src.placement.plan import union_of_rows
from feedline._src.plan.asked import (
    PLACE,
    VALID,
    adds_valid,
    batch_of_rows,
    number_of,
    reads_by_leaf,
    with_own_leaves,
)
from feedline._src.rows.spec import RowSpec

if TYPE_CHECKING:
    from feedline._src.pipeline.bounds import Bounds


_LEAST_THREADS, _MOST_THREADS = 2, 16
"""By default. With one thread nothing would be read while a batch is placed."""


def default_threads() -> int:
    """The threads that read if `Reading.threads` is None."""
    return min(max(own_cores(), _LEAST_THREADS), _MOST_THREADS)


def settings_of(
    options: FeedOptions, form: LocalForm, placement: Placement, *, stream: bool = False
) -> tuple[Settings, Bounds | None]:
    """The settings to begin with, and within which bounds they may be tuned; None: they stay."""
    settings, tunable = options.first_settings(default_threads()), options.tunable
    if stream:  # the placement thread reads it
        settings, tunable = settings._replace(threads=0), tunable & {"prefetch"}
    if options.reading.bad_rows != "raise":  # a row that only workers cannot read would be replaced there
        tunable -= {"workers"}
    if not tunable:
        return settings, None
    own = [device for leaf in jax.tree.leaves(placement.spec) for device in leaf.sharding.addressable_devices]
    shard = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(placement.spec)
    )
    from feedline._src.pipeline.bounds import bounds_of

    bounds, settings = bounds_of(
        options.reading.limits,
        tunable,
        settings,
        local_bytes=BatchBuffers(form, 0, options.steps_per_call).staging.batch_bytes,
        shard_bytes=shard,
        devices=own,
    )
    return settings, bounds


def buffers_of(options: FeedOptions, form: LocalForm, settings: Settings) -> BatchBuffers:
    """With as many idle slabs as a steady feed uses where device arrays lie in them."""
    return BatchBuffers(form, settings.host_batches_on_cpu_devices, options.steps_per_call)


def form_of(
    options: FeedOptions,
    batch_size: int,
    spec: RowSpec,
    seed: int,
    read_first: Callable[[Any], None],
    *,
    reads_leaves: bool,
    ragged: tuple[int, ...] = (),
) -> tuple[LocalForm, Placement]:
    """What this process supplies of each batch, and where batches go.

    Args:
      seed: of the keys that a transform gets.
      read_first: writes one row into a tree of arrays.
      reads_leaves: whether the source can read one leaf's rows and columns alone.
      ragged: the numbers of the leaves whose axis 1 differs between batches.
    """
    out = spec
    if options.transform is not None:
        row = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in spec.leaves]
        read_first(spec.tree(row))
        out = transformed_spec(options.transform, spec, row)
    read = batch_of_rows(out, batch_size, options.sharding)
    plans = Placement.of(read, ragged).plans
    batch = with_own_leaves(read, batch_size, options)
    rows = union_of_rows(plans)
    by_leaf = reads_by_leaf(
        plans,
        rows,
        reads_columns=reads_leaves,
        transformed=options.transform is not None,
        bad_rows=options.reading.bad_rows,
    )
    mask, mask_at = None, 0
    if adds_valid(options):
        mask, mask_at = Placement.of({VALID: batch[VALID]}).plans[0].rows, number_of(VALID, read)
    form = LocalForm(
        spec, options.transform, seed, out, plans, rows, by_leaf, mask, mask_at, options.reading.bad_rows, ragged
    )
    own = [name for name in (VALID, PLACE) if isinstance(batch, dict) and name in batch and name not in read]
    placed = tuple(i + sum(number_of(name, read) <= i for name in own) for i in ragged)
    return form, Placement.of(with_steps(batch, options.steps_per_call), placed)
