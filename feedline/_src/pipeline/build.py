"""Builds the stages of a feed: opens the source, plans the reads of this process, agrees with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from feedline._src import state as states
from feedline._src.agreement.agree import collective_build
from feedline._src.agreement.coordination import Coordination, coordination
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.batch_reader import BatchReader
from feedline._src.loader.restarts import Restarts
from feedline._src.options import Reading
from feedline._src.order.schedule import ENDLESS, Cursor, Schedule
from feedline._src.pipeline.access import RandomAccess, StreamAccess
from feedline._src.pipeline.description import described, processes_of
from feedline._src.pipeline.forms import buffers_of, form_of, settings_of
from feedline._src.pipeline.stages import Stages
from feedline._src.placement.place import check_shardings
from feedline._src.placement.plan import as_shardings
from feedline._src.plan.asked import PLACE, SourceMetadata, check_options, number_of
from feedline._src.prefetch.watch import alarmed
from feedline._src.rows.source import Source
from feedline._src.sources.lanes import Lanes, is_stream
from feedline._src.sources.open_source import as_source, read_first

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep
    from feedline._src.agreement.latest_values import LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck


def build(options: FeedOptions, running: tuple[Stages, Sequence[int]] | None = None) -> Stages:
    """Open the source, plan what this process reads, and check that all of it fits together.

    With a mesh of several processes all of them do so, and compare what they built.

    Args:
      running: the stages of a feed that moves to another mesh, whose source is read on, and its place: step,
        epoch and position, which all processes must share.

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
            stages = _build_sizes(options, collective.key, None if running is None else running[0])
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
                    place=None if running is None else list(running[1]),
                )
            )
        except BaseException:
            if running is None:
                stages.close()
            raise
    service, key = coordination(), collective.key
    if service is None or key is None:
        return stages
    from feedline._src.agreement.in_step import InStep
    from feedline._src.agreement.latest_values import LatestValues

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
    from feedline._src.agreement.replicas import ReplicaCheck

    rows, placement = stages.fingerprint["rows"], stages.placement
    size = stages.access.batch_size * options.steps_per_call
    return ReplicaCheck(
        service, key, every=every, batch_size=size, epoch_rows=rows, spec=placement.spec, plans=placement.plans
    )


def moved(stages: Stages, options: FeedOptions, sharding: Any, place: Sequence[int]) -> tuple[FeedOptions, Stages]:
    """The options and stages of a running feed on another mesh of the same processes.

    Args:
      stages: of the feed, for its first batch size.
      place: as `build` takes it.

    Raises:
      ValueError, TypeError: other processes own the devices of `sharding`, or would read other lanes of a
        stream; or what `build` raises. The feed may go on as it was.
      ProcessError: processes move to other meshes, or at other places.
    """
    try:
        sharding = as_shardings(sharding)
        check_shardings(sharding)
        before, after = processes_of(options.sharding), processes_of(sharding)
        if before != after:
            raise ValueError(
                f"a feed moves to a mesh of the same processes, {sorted(before)}, and that of sharding has "
                f"devices of {sorted(after)}; save get_state(), and build a feed there"
            )
    except (ValueError, TypeError) as error:
        refused(options.sharding, error)
        raise
    options = dataclasses.replace(options, sharding=sharding)
    new = build(options, (stages, place))
    if isinstance(stages.access, StreamAccess):
        from feedline._src.placement.owners import owners_of

        lanes = len(stages.access.writers)
        owners = [owners_of(jax.tree.leaves(each.placement.spec), lanes) for each in (stages, new)]
        if owners[0] != owners[1]:  # the same on all processes, so all of them raise
            raise ValueError(
                "a stream's iterators stay in their processes, and on this mesh its lanes would be read by "
                f"{owners[1]}, not {owners[0]} (processes by lane); save them with feedline.save_lanes, and build "
                "a feed there"
            )
    return options, new if new.bounds is None else new.tuned(stages.settings)


def _build_sizes(options: FeedOptions, key: str | None, running: Stages | None) -> Stages:
    """This process's own part of it, for each batch size. The source is opened once.

    Args:
      key: a path for what the processes of this feed tell each other.
      running: as of `build`.
    """
    if options.reading.quarantine is not None:
        open(options.reading.quarantine, "ab").close()  # so that a missing folder is seen now, not after hours
    if is_stream(options.source):
        from feedline._src.pipeline.build_stream import build_stream

        return build_stream(options, Lanes.of(options.source), key)
    if running is None or not isinstance(running.access, RandomAccess):
        source, restarts = as_source(options.source), Restarts(options.reading.restart)
    else:
        source, restarts = running.access.reader.source, running.access.restarts
    metadata = SourceMetadata.of(source)
    check_options(options, metadata)
    if isinstance(options.batch_size, int):
        return _build(options, options.batch_size, source, metadata, key, restarts)
    change: tuple[int, Stages] | None = None
    for step, size in reversed(options.batch_size):
        built = _build(options, size, source, metadata, key, restarts)
        order = {**built.fingerprint["order"], "batch_sizes": [list(pair) for pair in options.batch_size]}
        owned = None if step else built.owned
        fingerprint = {**built.fingerprint, "order": order}
        built = dataclasses.replace(built, fingerprint=fingerprint, change=change, owned=owned)
        change = step, built
    return built


def _build(
    options: FeedOptions,
    batch_size: int,
    source: Source,
    metadata: SourceMetadata,
    key: str | None,
    restarts: Restarts,
) -> Stages:
    """The stages for one batch size, over rows with random access."""
    order = source.order_for(options.order)
    rows = ENDLESS if metadata.rows is None else metadata.rows
    schedule = Schedule(rows, batch_size, options.remainder, options.epochs)
    form, placement = form_of(
        options,
        batch_size,
        metadata.spec,
        order.seed,
        functools.partial(read_first, source),
        reads_leaves=metadata.reads_columns,
        ragged=metadata.ragged,
    )
    reader = BatchReader(source, order, schedule, form)
    settings, bounds = settings_of(options, form, placement)
    if options.reading.workers:
        from feedline._src.loader.workers import check_main_guard

        check_main_guard()
    fingerprint = {
        "rows": rows,
        "spec": metadata.spec.as_json(),
        "data": _digest(source, options.reading),
        "order": order.as_json(),
        "format": source.format,
    }
    owned = None if source is options.source else source
    buffers = buffers_of(options, form, settings)
    access = RandomAccess(reader, buffers, restarts, options.steps_per_call)
    access.check_cursor(Cursor(0, 0))
    return Stages(
        access,
        placement,
        fingerprint,
        options.reading,
        settings,
        owned,
        bounds=bounds,
        place_at=number_of(PLACE, placement.spec) if options.with_place else None,
    )


def _digest(source: Source, reading: Reading) -> str:
    if reading.bad_rows == "raise":
        source.check_rows()
    identity = source.identity if reading.bad_rows == "raise" else source.identity_allowing_bad_rows()
    try:
        return states.digest(identity)
    except TypeError as error:
        raise TypeError(
            f"the identity of a RowSource must be made of JSON values, that of {source.kind} is not: "
            f"{error}; convert NumPy's numbers with int() or float()"
        ) from error
