"""Builds the stages of a feed: opens the source, plans the reads of this process, agrees with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from feedline._src import state as states
from feedline._src.agreement.agree import collective_build
from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import Coordination, coordination
from feedline._src.agreement.in_step import InStep
from feedline._src.agreement.latest_values import LatestValues
from feedline._src.agreement.replicas import ReplicaCheck
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.batch_reader import BatchReader
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.form import LocalForm, transformed_spec
from feedline._src.loader.restarts import Restarts
from feedline._src.loader.worker_batches import check_workers
from feedline._src.options import Order, Reading, Settings
from feedline._src.order.mixture import MixtureOrder
from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.pipeline.access import RandomAccess, StreamAccess
from feedline._src.pipeline.bounds import bounds_of
from feedline._src.pipeline.description import described, processes_of
from feedline._src.pipeline.quarantine import Quarantine
from feedline._src.pipeline.settings import first_settings, tunable_settings
from feedline._src.pipeline.stages import Stages
from feedline._src.placement.owners import owners_of, read_everywhere, warn_of_shared_lanes
from feedline._src.placement.place import Placement, row_spec, sharded_spec, with_steps
from feedline._src.placement.plan import union_of_rows
from feedline._src.prefetch.watch import alarmed
from feedline._src.rows.row_source import RowSource, is_columnar, is_ragged
from feedline._src.rows.spec import RowSpec
from feedline._src.sources.groups import GroupSource
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.sources.mixture import Mixture, epoch_rows
from feedline._src.sources.open_source import as_source, read_first
from feedline._src.sources.records import RecordSource
from feedline._src.streams.partial_batches import StreamDefinition
from feedline._src.tuning.candidates import Bounds

VALID = "valid"
"""The key of the boolean leaf that remainder "pad" and bad_rows "mask" add."""
PLACE = "place"
"""The key of the int32 leaf that with_place adds."""
_PLACES = 3
"""How often processes agree in an epoch of one batch: on the batch, on its end, and on the rows that are left."""
_AHEAD = 4
"""Batches in progress beside those that wait: one handed over, one placed, one read here, one read elsewhere."""


def build(options: FeedOptions) -> Stages:
    """Open the source, plan what this process reads, and check that all of it fits together.

    With a mesh of several processes all of them do so, and compare what they built.

    Raises:
      ValueError, TypeError, FileNotFoundError: it does not.
      ProcessError: another process built something else, failed, or did not come.
    """
    reading, processes = options.reading, processes_of(options.sharding)
    with collective_build(processes, reading.stall_warning_s, reading.stall_error_s) as collective:
        with alarmed(
            reading.stall_warning_s,
            lambda: (
                f"building a feed has taken {reading.stall_warning_s:g} s so far: it opens the source, reads its "
                "first row, and calls the transform with that"
            ),
        ):
            stages = _build_sizes(options, collective.key)
        try:
            collective.agree(
                described(
                    fingerprint=stages.fingerprint,
                    batch_size=options.batch_size,
                    epochs=options.epochs,
                    remainder=options.remainder,
                    reading=reading,
                    prefetch=stages.settings.prefetch if stages.access.agrees_on_ends else None,
                    spec=stages.placement.spec,
                )
            )
        except BaseException:
            stages.close()
            raise
    service, key = coordination(), collective.key
    if service is None or key is None:
        return stages
    return _connected(
        service, key, options, stages, LatestValues(service, key), InStep(service, key, len(processes))
    )


def refused(sharding: Any, error: Exception) -> None:
    """Tell the other processes of the mesh, which build this feed, that an argument is wrong here."""
    with contextlib.suppress(Exception), collective_build(processes_of(sharding), 30.0, 300.0):
        raise error


def _connected(
    service: Coordination,
    key: str,
    options: FeedOptions,
    stages: Stages,
    latest_values: LatestValues,
    in_step: InStep,
) -> Stages:
    """Add the channels over which processes talk during training to the stages of each batch size."""
    if stages.change is not None:
        step, later = stages.change
        stages = dataclasses.replace(
            stages, change=(step, _connected(service, f"{key}/{step}", options, later, latest_values, in_step))
        )
    check = _check(service, key, options, stages)
    return dataclasses.replace(stages, check=check, latest_values=latest_values, in_step=in_step)


def _check(service: Coordination, key: str, options: FeedOptions, stages: Stages) -> ReplicaCheck | None:
    every = options.reading.check_replicas_every
    if not every:
        return None
    rows, placement = stages.fingerprint["rows"], stages.placement
    size = stages.access.batch_size * options.steps_per_call
    return ReplicaCheck(
        service, key, every=every, batch_size=size, epoch_rows=rows, spec=placement.spec, plans=placement.plans
    )


def _build_sizes(options: FeedOptions, key: str | None) -> Stages:
    """This process's own part of it, for each batch size. The source is opened once.

    Args:
      key: a path for what the processes of this feed tell each other.
    """
    source, restarts = as_source(options.source), Restarts(options.reading.restart)
    if isinstance(options.batch_size, int):
        return _build(options, options.batch_size, source, key, restarts)
    problem = None
    if isinstance(source, grain.IterDataset | Lanes):
        problem = "a stream"
    elif options.steps_per_call > 1:
        problem = f"steps_per_call={options.steps_per_call}"
    elif tunable_settings(options):
        problem = f'"auto" for {", ".join(sorted(tunable_settings(options)))}'
    if problem is not None:
        raise ValueError(
            "batch sizes that change need rows with random access, one step per call and settings that are given, "
            f"got {problem}; leave that out, or, where the size is to change, build another feed and set_state of "
            "this one's state"
        )
    change: tuple[int, Stages] | None = None
    seen: set[int | tuple[int, int]] = set()
    for step, size in reversed(options.batch_size):
        built = _build(options, size, source, key, restarts)
        order = {**built.fingerprint["order"], "batch_sizes": [list(pair) for pair in options.batch_size]}
        owned = None if step else built.owned
        built = dataclasses.replace(
            built,
            fingerprint={**built.fingerprint, "order": order},
            change=change,
            owned=owned,
            quarantine=dataclasses.replace(built.quarantine, seen=seen),
        )
        change = step, built
    return built


def _build(options: FeedOptions, batch_size: int, source: Any, key: str | None, restarts: Restarts) -> Stages:
    """The stages for one batch size."""
    if isinstance(source, grain.IterDataset | Lanes):
        return _build_stream(options, batch_size, Lanes.of(source), key)
    rows = epoch_rows(source)
    if rows < 1:
        raise ValueError(f"a source must have at least one row, {type(source).__name__} has {rows}")
    order = _order_of(options, source)
    schedule = Schedule(rows, batch_size, options.remainder, options.epochs)
    spec = RowSpec.of(source.spec)
    form, placement = _form(
        options,
        batch_size,
        spec,
        order.seed,
        functools.partial(read_first, source),
        reads_leaves=is_columnar(source),
        ragged=source.ragged_leaves if is_ragged(source) else (),
    )
    reader = BatchReader(source, order, schedule, form)
    settings, bounds = _settings(options, form, placement)
    if options.reading.workers:
        if options.steps_per_call > 1 and settings.workers:
            raise ValueError(
                f"steps_per_call={options.steps_per_call} needs threads that read; leave workers=0, or give "
                "steps_per_call=1"
            )
        check_workers(reader, may_do_without=not settings.workers)
    fingerprint = {
        "rows": rows,
        "spec": spec.as_json(),
        "data": _digest(source, options.reading),
        "order": order.as_json() if isinstance(order, MixtureOrder) else dataclasses.asdict(order),
        "format": _format(source),
    }
    owned = None if source is options.source else source
    buffers = _buffers(options, form, settings.buffer, settings.prefetch)
    access = RandomAccess(reader, buffers, restarts, options.steps_per_call)
    access.check_cursor(Cursor(0, 0))
    return Stages(
        access,
        placement,
        fingerprint,
        options.reading,
        settings,
        _quarantine(options, form, len(source)),
        owned,
        bounds=bounds,
        place_at=_number_of(PLACE, placement.spec) if options.with_place else None,
    )


def _format(source: RowSource) -> str:
    if isinstance(source, Mixture):
        return "mixture"
    return "records" if isinstance(source, RecordSource) else "columns"


def _digest(source: RowSource, reading: Reading) -> str:
    try:
        if reading.bad_rows != "raise" and isinstance(source, RecordSource | GroupSource | Mixture):
            return states.digest(source.identity_allowing_bad_rows())
        return states.digest(source.identity)
    except TypeError as error:
        raise TypeError(
            f"the identity of a RowSource must be made of JSON values, that of {type(source).__name__} is not: "
            f"{error}; convert NumPy's numbers with int() or float()"
        ) from error


def _build_stream(options: FeedOptions, batch_size: int, lanes: Lanes, key: str | None) -> Stages:
    if options.order is not None:
        raise ValueError(
            "a stream has no other order than its own; shuffle the Grain dataset, and leave order=None"
        )
    if options.reading.workers not in (0, "auto"):
        raise ValueError("a stream brings its own workers: use dataset.mp_prefetch(...), and leave workers=0")
    if options.steps_per_call > 1:
        raise ValueError(
            "a stream has no random access, so its batches are delivered one by one; leave steps_per_call=1"
        )
    if options.remainder == "wrap" and lanes.count > 1:
        raise ValueError(
            f'remainder "wrap" needs one lane, since each ends at a place of its own, got {lanes.count}; repeat '
            'each lane in Grain (grain.experimental.RepeatIterDataset), or use remainder="drop" or "pad"'
        )
    lanes.check_batch_size(batch_size)
    first = FirstItem(lanes)
    form, placement = _form(options, batch_size, first.spec, 0, first.read, reads_leaves=False)
    settings, bounds = _settings(options, form, placement, stream=True)
    fingerprint = {
        "rows": None,
        "spec": first.spec.as_json(),
        "data": states.digest(first.identity),
        "order": None,
        "format": "stream" if lanes.count == 1 else f"{lanes.count} lanes",
    }
    owners = owners_of(jax.tree.leaves(placement.spec), lanes.count)
    if lanes is options.source:
        warn_of_shared_lanes(owners, jax.tree.leaves(placement.spec))
    window = 1 if read_everywhere(owners) else max(1, settings.prefetch)
    gather = None
    if not read_everywhere(owners):
        if options.prefetch == "auto":
            raise ValueError(
                "processes that read different lanes agree on the ends of these in windows of `prefetch` batches, "
                'so prefetch must be the same everywhere and cannot be "auto"; give a number, such as prefetch=2'
            )
        gather = AllGather.connect(key, len(set(itertools.chain(*owners))), _PLACES * (window + _AHEAD))
    stream = StreamDefinition(lanes, first, form, batch_size, options.remainder, options.epochs, gather, window)
    access = StreamAccess(
        stream,
        _buffers(options, form, window, settings.prefetch),
        lanes=[str(lane) for lane in stream.local_lanes],
        writers=[processes[0] for processes in owners],
    )
    return Stages(
        access,
        placement,
        fingerprint,
        options.reading,
        settings,
        _quarantine(options, form, None),
        None,
        bounds=bounds,
        place_at=_number_of(PLACE, placement.spec) if options.with_place else None,
    )


def _settings(
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
    bounds, settings = bounds_of(
        options.reading.limits,
        tunable,
        settings,
        local_bytes=BatchBuffers(form, 0, options.steps_per_call).staging.batch_bytes,
        shard_bytes=shard,
        devices=own,
    )
    return settings, bounds


def _quarantine(options: FeedOptions, form: LocalForm, source_rows: int | None) -> Quarantine:
    return Quarantine(options.reading, len(form.rows), jax.process_index(), source_rows)


def _buffers(options: FeedOptions, form: LocalForm, ahead: int, prefetch: int) -> BatchBuffers:
    """With as many idle slabs as a steady feed uses: read ahead, being placed, waiting, and two in use."""
    return BatchBuffers(form, ahead + 1 + prefetch + 2, options.steps_per_call)


def _form(
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
        mask_at = _number_of(VALID, batch)
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
        placed = tuple(i + (i >= _number_of(PLACE, batch)) for i in placed)
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


def _number_of(name: str, batch: Mapping[str, Any]) -> int:
    """How many leaves of a batch come before the leaf `name`."""
    return len(jax.tree.leaves([batch[key] for key in sorted(batch) if key < name]))


def _order_of(options: FeedOptions, source: RowSource) -> Order | MixtureOrder:
    if isinstance(source, Mixture):
        if options.order is not None:
            raise ValueError(
                f"a mixture has an order of its own, got order={options.order!r}; leave order=None, and give "
                "Mixture seed=..., or orders={name: Order(...)} for its sources"
            )
        if options.epochs is not None and source.order.end == "endless":
            raise ValueError(
                f"an endless mixture has no epochs to count, got epochs={options.epochs}; leave epochs=None, or "
                'give Mixture end="first_exhausted" or "all_exhausted"'
            )
        return source.order
    if isinstance(source, RecordSource) and isinstance(options.source, grain.MapDataset):
        if options.order is not None and len(source) == sys.maxsize:
            raise ValueError(
                "a dataset after repeat() is one endless epoch, which no Order can shuffle; pass it without "
                "repeat() and let the feed's epochs repeat it, or shuffle it in Grain and leave order=None"
            )
        return options.order or Order(shuffle=False)
    return options.order or Order()
