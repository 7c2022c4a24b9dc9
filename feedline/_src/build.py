"""Builds a feed: opens the source, plans what this process reads, and compares the feeds of all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from feedline._src import state as states
from feedline._src.agreement.agree import CollectiveBuild, collective_build
from feedline._src.agreement.in_step import Place
from feedline._src.bounds import Bounds, bounds_of, default_threads
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.form import LocalForm, transformed_spec
from feedline._src.loader.random_access import Access, RandomAccess
from feedline._src.loader.restarts import Restarts
from feedline._src.loader.staging import BatchBuffers
from feedline._src.options import Settings
from feedline._src.placement.place import Placement
from feedline._src.plan.asked import SourceMetadata, refused
from feedline._src.plan.plan import Plan, devices_by_process, plan_of
from feedline._src.plan.shardings import as_shardings, check_has_devices
from feedline._src.prefetch.watch import alarmed
from feedline._src.rows.source import Source
from feedline._src.rows.spec import RowSpec
from feedline._src.run import Sizes, Stages
from feedline._src.runtime.threads import JaxSettings
from feedline._src.sources.as_source import opened
from feedline._src.version import __version__

if TYPE_CHECKING:
    from feedline._src.agreement.all_gather import AllGather

_PACKAGES = ("jax", "jaxlib", "grain", "numpy")
_AGREEMENTS_PER_EPOCH = 3  # in an epoch of one batch: for the batch, for the end, for the rows left over
_IN_FLIGHT = 4  # batches: one handed over, one being placed, one read here, one read by another process
_log = logging.getLogger("feedline")


def build(options: FeedOptions, running: tuple[Sizes, Place] | None = None) -> Sizes:
    """Open the source, plan what this process reads, and check that all of it fits together.

    If the mesh has several processes, all of them must call this function; they compare what they built.

    Args:
      running: the present stages and the `Place` (step, epoch, position) of a feed that moves to another mesh.
        The place must be the same in all processes. None: a new feed.

    Raises:
      ValueError, TypeError, FileNotFoundError: an argument is wrong, or a file is missing.
      ProcessError: another process built something else, failed, or did not arrive.
    """
    before, place = (None, None) if running is None else (running[0], list(running[1]))
    # a feed that moves keeps the settings of the thread that built it: x64 determines its dtypes
    jax_settings = JaxSettings.of_this_thread() if before is None else before.first.placement.jax_settings
    after_s = options.reading.stall_warning_s
    message = (
        f"building a feed has taken {after_s:g} s so far: it opens the source, reads its first row, and calls the "
        "transform with that row"
    )
    with _collective(options, None if running is None else "feed.move") as collective:
        with alarmed(after_s, lambda: message), jax_settings.applied():
            sizes = _open(options, collective.key, before)
        try:
            collective.agree(described(options, sizes.first, place))
        except BaseException:
            if running is None:
                sizes.close()
            raise
    return _connected(sizes, options, collective, before)


def _collective(options: FeedOptions, call: str | None) -> contextlib.AbstractContextManager[CollectiveBuild]:
    """Context manager in which the processes of the mesh build together: if one raises, all raise."""
    reading = options.reading
    return collective_build(_processes_of(options.sharding), reading.stall_warning_s, reading.stall_error_s, call)


def refuse_everywhere(sharding: Any, error: Exception, call: str | None = None) -> None:
    """Make the other processes of the mesh, which build the same feed, raise this process's error."""
    with (
        contextlib.suppress(Exception),
        collective_build(_processes_of(as_shardings(sharding)), 30.0, 300.0, call),
    ):
        raise error


def moved(sizes: Sizes, options: FeedOptions, sharding: Any, place: Place) -> tuple[FeedOptions, Sizes]:
    """Return the options and stages of a running feed for another mesh of the same processes.

    Args:
      place: where the next batch begins; it must be the same in all processes.

    Raises:
      ValueError, TypeError: as in `build`; or the devices of `sharding` belong to other processes than before, or
        another process would read a lane of a stream. The feed can continue as it was.
      ProcessError: processes move to different meshes, or at different places.
    """
    try:
        wanted = dataclasses.replace(options, sharding=sharding)
        before, after = _processes_of(options.sharding), _processes_of(wanted.sharding)
        if before != after:
            raise ValueError(
                f"a feed can only move to a mesh of the same processes, {sorted(before)}, and the mesh of "
                f"sharding has devices of {sorted(after)}; save get_state(), and build a feed on that mesh"
            )
    except (ValueError, TypeError) as error:
        refuse_everywhere(options.sharding, error, "feed.move")
        raise
    new = build(wanted, (sizes, place))
    owners = [each.first.plan.lane_owners for each in (sizes, new)]
    if owners[0] != owners[1]:  # the same on all processes, so all of them raise
        raise ValueError(
            "a stream's iterators stay in their processes, and on this mesh its lanes would be read by "
            f"{owners[1]}, not {owners[0]} (the processes of each lane); save the lanes with feedline.save_lanes, "
            "and build a feed on this mesh"
        )
    return wanted, new


def reweighted(sizes: Sizes, options: FeedOptions, weights: Mapping[str, float], place: Place) -> Sizes:
    """Return the stages of a running feed, with other weights for its mixture. Arguments as in `moved`.

    Raises:
      ValueError, TypeError: the feed reads no mixture, or the weights do not suit the mixture.
      ProcessError: processes pass different weights, or pass them at different places.
    """
    with _collective(options, "feed.set_weights") as collective:
        sizes = sizes.map(
            lambda stages: stages.reweighted(stages.access.source.with_weights(weights, place.position))
        )
        collective.agree(described(options, sizes.first, list(place)))
    return sizes


def _open(options: FeedOptions, key: str | None, running: Sizes | None) -> Sizes:
    """Open the source, or use the running feed's, and make the stages of each batch size."""
    if options.reading.quarantine is not None:
        open(options.reading.quarantine, "ab").close()  # so that a missing folder raises now, not after hours
    if running is not None:
        source, restarts, owned = running.first.access.source, running.first.restarts, running.source
    else:
        source, restarts = opened(options.source), Restarts(options.reading.restart)
        owned = None if source is options.source else source
    metadata = SourceMetadata.of(source)
    _check(refused(options, metadata))
    of_size = {
        size: _stages(dataclasses.replace(options, batch_size=size), source, metadata, restarts, key)
        for size in dict.fromkeys(size for _, size in options.sizes)
    }
    if not isinstance(options.batch_size, int):
        sizes = [list(pair) for pair in options.batch_size]
        for stages in of_size.values():
            stages.fingerprint["order"]["batch_sizes"] = sizes
    return Sizes(tuple((step, of_size[size]) for step, size in options.sizes), owned)


def _stages(
    options: FeedOptions, source: Source, metadata: SourceMetadata, restarts: Restarts, key: str | None
) -> Stages:
    """The stages of one batch size."""
    order = source.order_for(options.order)
    plan, out = _planned(options, source, metadata)
    (part,) = plan.reads
    transform, bad_rows, steps = options.transform, options.reading.bad_rows, options.steps_per_call
    form = LocalForm(metadata.spec, out, part, transform, order.seed, bad_rows, metadata.ragged)
    settings, bounds = _settings_and_bounds(options, plan)
    if bad_rows == "raise":
        source.check_rows()
    try:
        digest = states.digest(source.identity)
    except TypeError as error:
        raise TypeError(
            f"the identity of a RowSource must be made of JSON values, and the identity of {source.kind} is not: "
            f"{error}; convert NumPy's numbers with int() or float()"
        ) from error
    fingerprint = {
        "rows": order.rows,
        "spec": metadata.spec.as_json(),
        "data": digest,
        "order": order.as_json(),
        "format": source.format,
    }
    buffers = BatchBuffers(form, settings.host_batches_on_cpu_devices, steps)
    access: Access
    if plan.lanes:
        from feedline._src.loader.streams import Stream

        fingerprint |= {"rows": None, "order": None}  # unknown, as long as a stream is not read
        access = Stream(source, order, form, buffers, plan, options.epochs, _gather_of(plan, key))
    else:
        access = RandomAccess(source, order, form, buffers, plan.schedule, steps)
    names = list(plan.leaves)
    ragged = tuple(names.index(out.leaves[i].name) for i in metadata.ragged)
    placement = Placement(plan.spec, steps * part.local_bytes, ragged)
    return Stages(plan, access, placement, fingerprint, options.reading, settings, restarts, bounds)


def _gather_of(plan: Plan, key: str | None) -> AllGather | None:
    """Exchanges the ends of a stream's lanes with the other processes; None: each process reads every lane."""
    shared = sum(len(processes) > 1 for processes in plan.lane_owners)
    if shared and plan.lanes > 1 and plan.lanes % plan.shards:
        _log.warning(
            "%d of %d lanes run on several processes: the batch axis has %d shards, and some hold only a part of "
            "a lane's rows; to run each lane only where its rows are, make the number of lanes a multiple of %d",
            shared,
            plan.lanes,
            plan.shards,
            plan.shards,
        )
    if not plan.agrees_on_ends:
        return None
    from feedline._src.agreement.all_gather import AllGather

    readers = set().union(*plan.lane_owners)
    kept = _AGREEMENTS_PER_EPOCH * (plan.settings.buffer + _IN_FLIGHT)
    return AllGather.connect(key, len(readers), kept)


def _check(problems: Iterable[str]) -> None:
    """Raise the first problem."""
    for problem in problems:
        raise ValueError(problem)


def _planned(options: FeedOptions, source: Source, metadata: SourceMetadata) -> tuple[Plan, RowSpec]:
    """Return this process's plan, and the spec of a transformed row. Calls the transform with the first row."""
    out = metadata.spec
    if options.transform is not None:
        row = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in out.leaves]
        source.read(np.zeros(1, np.int64), out.tree(row))
        out = transformed_spec(options.transform, out, row)
    shardings = jax.tree.leaves(options.sharding)
    here = {device.process_index for leaf in shardings for device in leaf.addressable_devices}
    process = here.pop() if here else jax.process_index()
    plan = plan_of(metadata, out, options, devices_by_process(options.sharding, None), process, default_threads())
    _check(plan.problems)
    return plan, out


def _settings_and_bounds(options: FeedOptions, plan: Plan) -> tuple[Settings, Bounds | None]:
    """Return the first settings, and the bounds for tuning them; bounds are None if no setting is tuned."""
    tunable = options.tunable
    if plan.lanes:  # a stream: one thread reads and places its batches
        tunable &= {"prefetch"}
    if options.reading.bad_rows != "raise":  # a row that workers cannot read, but threads can, would be replaced
        tunable -= {"workers"}
    if not tunable:
        return plan.settings, None
    (reads,) = plan.reads
    bounds, settings = bounds_of(
        options.reading.limits,
        tunable,
        plan.settings,
        local_bytes=options.steps_per_call * (reads.local_bytes + reads.read_bytes),
        shard_bytes=plan.memory.device_bytes // plan.settings.device_batches,
        devices=[d for leaf in jax.tree.leaves(plan.spec) for d in leaf.sharding.addressable_devices],
    )
    return settings, bounds


def _connected(sizes: Sizes, options: FeedOptions, collective: CollectiveBuild, before: Sizes | None) -> Sizes:
    """Add to the stages the objects by which processes communicate during training."""
    service, key = collective.service, collective.key
    if service is None or key is None:
        return sizes
    from feedline._src.agreement.in_step import InStep, LatestValues

    old = None if before is None else before.first.in_step
    latest_values = LatestValues(service, key)
    in_step = InStep(service, key, len(collective.processes), 0 if old is None else old.batches)
    by_step = []
    for step, stages in sizes.by_step:
        check = None
        if options.reading.check_replicas_every:
            from feedline._src.agreement.replicas import ReplicaCheck

            check = ReplicaCheck(
                service,
                f"{key}/{step}" if step else key,
                every=options.reading.check_replicas_every,
                batch_size=stages.plan.batch_size,
                epoch_rows=stages.fingerprint["rows"],
                spec=stages.placement.spec,
                steps_per_call=options.steps_per_call,
            )
        connected = dataclasses.replace(stages, check=check, latest_values=latest_values, in_step=in_step)
        by_step.append((step, connected))
    return dataclasses.replace(sizes, by_step=tuple(by_step))


def _processes_of(sharding: Any) -> set[int]:
    """The processes that own a device of a sharding, or of a tree of shardings."""
    check_has_devices(sharding)
    devices: set[Any] = set().union(*(leaf.device_set for leaf in jax.tree.leaves(sharding)))
    return {device.process_index for device in devices}


def described(options: FeedOptions, stages: Stages, place: list[Any] | None = None) -> dict[str, Any]:
    """Return, as JSON values by field, all that must be equal in all processes, so that batch k is the same."""
    return {
        "name": options.name,
        "version": {"feedline": __version__, **{package: version(package) for package in _PACKAGES}},
        **stages.fingerprint,
        "place": place,
        **stages.plan.compared,
    }
