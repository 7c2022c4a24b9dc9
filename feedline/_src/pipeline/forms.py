"""What follows from the options of a feed and the spec of a row: what this process supplies, and its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from feedline._src.feed_options import FeedOptions
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.form import LocalForm, transformed_spec
from feedline._src.options import Settings
from feedline._src.pipeline.quarantine import Quarantine
from feedline._src.pipeline.settings import first_settings, tunable_settings
from feedline._src.placement.place import Placement, row_spec, sharded_spec, with_steps
from feedline._src.placement.plan import union_of_rows
from feedline._src.rows.spec import RowSpec

if TYPE_CHECKING:
    from feedline._src.tuning.candidates import Bounds

VALID = "valid"
"""The key of the boolean leaf that remainder "pad" and bad_rows "mask" add."""
PLACE = "place"
"""The key of the int32 leaf that with_place adds."""


def settings_of(
    options: FeedOptions, form: LocalForm, placement: Placement, *, stream: bool = False
) -> tuple[Settings, Bounds | None]:
    """The settings to begin with, and within which bounds they may be tuned; None: they stay."""
    settings, tunable = first_settings(options), tunable_settings(options)
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


def quarantine_of(options: FeedOptions, form: LocalForm, source_rows: int | None) -> Quarantine:
    return Quarantine(options.reading, len(form.rows), jax.process_index(), source_rows)


def buffers_of(options: FeedOptions, form: LocalForm, ahead: int, prefetch: int) -> BatchBuffers:
    """With as many idle slabs as a steady feed uses: read ahead, being placed, waiting, and two in use."""
    return BatchBuffers(form, ahead + 1 + prefetch + 2, options.steps_per_call)


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
    if ragged:
        _check_ragged(options)
    out = spec
    if options.transform is not None:
        row = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in spec.leaves]
        read_first(spec.tree(row))
        out = transformed_spec(options.transform, spec, row)
    rows = out.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.placed_dtype) for leaf in out.leaves])
    batch = sharded_spec(rows, batch_size, options.sharding)
    plans = Placement.of(batch, ragged).plans
    mask, mask_at = None, 0
    bad_rows = options.reading.bad_rows
    if options.remainder == "pad" or bad_rows == "mask":
        asker = 'remainder="pad"' if options.remainder == "pad" else 'Reading(bad_rows="mask")'
        batch = _with_leaf(batch, VALID, row_spec(batch, batch_size), asker)
        mask = Placement.of({VALID: batch[VALID]}).plans[0].rows
        mask_at = number_of(VALID, batch)
    rows_read = union_of_rows(plans)
    is_cut = not all(plan.whole_columns and len(plan.rows) == len(rows_read) for plan in plans)
    # where a bad row is replaced, whoever supplies any of it must find it bad: all read it whole
    by_leaf = is_cut and reads_leaves and options.transform is None and bad_rows == "raise"
    form = LocalForm(
        spec, options.transform, seed, out, plans, rows_read, by_leaf, mask, mask_at, bad_rows, ragged
    )
    placed = tuple(i + (mask is not None and i >= mask_at) for i in ragged)
    if options.with_place:
        batch = _with_leaf(batch, PLACE, row_spec(batch, batch_size, np.int32), "with_place=True")
        placed = tuple(i + (i >= number_of(PLACE, batch)) for i in placed)
    return form, Placement.of(with_steps(batch, options.steps_per_call), placed)


def _check_ragged(options: FeedOptions) -> None:
    if options.transform is not None:
        raise ValueError(
            "a transform must return one shape, and ragged leaves differ in length between batches; do this work "
            "in the jitted step, or before the rows are stored, and leave transform=None"
        )
    if options.steps_per_call > 1:
        raise ValueError(
            f"steps_per_call={options.steps_per_call} stacks batches of one shape, and ragged leaves differ in "
            "length between batches; leave steps_per_call=1"
        )


def _with_leaf(batch: Any, name: str, leaf: jax.ShapeDtypeStruct, asker: str) -> dict[str, Any]:
    """The spec of a batch with a leaf of feedline's own in it, which the argument `asker` asks for."""
    # a plain dict: JAX flattens it in the order of its keys, but an OrderedDict, say, in another
    if type(batch) is not dict or name in batch or not all(isinstance(key, str) for key in batch):
        found = f"it has the keys {list(batch)}" if type(batch) is dict else f"it is a {type(batch).__name__}"
        raise ValueError(
            f"{asker} adds a leaf {name!r}, so the batch must be a plain dict of strings without that key: "
            f'{found}. Name the arrays, as in {{"x": array}}, or leave {asker} out'
        )
    return {**batch, name: leaf}


def number_of(name: str, batch: Mapping[str, Any]) -> int:
    """How many leaves of a batch come before the leaf `name`."""
    return len(jax.tree.leaves([batch[key] for key in sorted(batch) if key < name]))
