"""Builds the stages of a feed over a stream: its lanes, who reads which, and how they agree on ends."""

from __future__ import annotations

import itertools

import jax

from feedline._src import state as states
from feedline._src.agreement.all_gather import AllGather
from feedline._src.feed_options import FeedOptions
from feedline._src.pipeline.access import StreamAccess
from feedline._src.pipeline.forms import buffers_of, form_of, settings_of
from feedline._src.pipeline.stages import Stages
from feedline._src.placement.owners import owners_of, read_everywhere, warn_of_shared_lanes
from feedline._src.plan.asked import PLACE, SourceMetadata, check_options, number_of
from feedline._src.plan.sizes import refused_auto_prefetch, stream_window
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.streams.partial_batches import StreamDefinition

_PLACES = 3
"""How often processes agree in an epoch of one batch: on the batch, on its end, and on the rows that are left."""
_AHEAD = 4
"""Batches in progress beside those that wait: one handed over, one placed, one read here, one read elsewhere."""


def build_stream(options: FeedOptions, lanes: Lanes, key: str | None) -> Stages:
    """The stages for a stream.

    Args:
      key: a path for what the processes of this feed tell each other.

    Raises:
      ValueError, TypeError: the arguments do not fit together.
      FeedError: the first item cannot be read.
    """
    batch_size, first = options.first_batch_size, FirstItem(lanes)
    check_options(options, SourceMetadata(first.spec, None, lanes.count))
    lanes.check_batch_size(batch_size)
    form, placement = form_of(options, batch_size, first.spec, 0, first.read, reads_leaves=False)
    settings, bounds = settings_of(options, form, placement, stream=True)
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
    window = stream_window(settings.prefetch, read_everywhere=read_everywhere(owners))
    gather = None
    if not read_everywhere(owners):
        for reason in refused_auto_prefetch(options, read_everywhere=False):
            raise ValueError(reason)
        gather = AllGather.connect(key, len(set(itertools.chain(*owners))), _PLACES * (window + _AHEAD))
    stream = StreamDefinition(lanes, first, form, batch_size, options.remainder, options.epochs, gather, window)
    access = StreamAccess(
        stream,
        buffers_of(options, form, settings._replace(buffer=window)),
        lanes=[str(lane) for lane in stream.local_lanes],
        writers=[processes[0] for processes in owners],
    )
    return Stages(
        access,
        placement,
        fingerprint,
        options.reading,
        settings,
        None,
        bounds=bounds,
        place_at=number_of(PLACE, placement.spec) if options.with_place else None,
    )
