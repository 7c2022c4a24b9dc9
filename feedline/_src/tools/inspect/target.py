"""Turns what the command line names (a path, a source, or a function that makes a feed) into a plan and rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from feedline._src.errors import FeedError, RowError
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.form import transformed_spec
from feedline._src.plan.asked import SourceMetadata
from feedline._src.plan.plan import Plan, devices_by_process, multiple_of, placed_rows, plan_of
from feedline._src.rows.spec import Array
from feedline._src.sources.as_source import opened
from feedline._src.tools.targets import Change, MakeFeed, build_feed

_ROWS_SHOWN = 3
_ROWS_PER_SHARD = 8


class Target(NamedTuple):
    """What `feedline inspect` describes: the plan of a feed over a mesh, and the first rows of each leaf.

    `refusal` is the error with which the user's function failed to build the feed.
    """

    mesh: Mesh | AbstractMesh
    options: FeedOptions
    plan: Plan
    first: list[Array]
    refusal: Exception | None = None


def of_source(
    source: Any, axes: Mapping[str, int], entries: Sequence[Any], processes: int, change: Change
) -> Target:
    """The target for a source, over a mesh that need not exist.

    `entries` are the entries of a PartitionSpec. A leaf with fewer axes uses only the first entries.
    """
    mesh, (metadata, first) = AbstractMesh(tuple(axes.values()), tuple(axes)), first_rows(source)
    sharding = jax.tree.map(
        lambda row: NamedSharding(mesh, PartitionSpec(*entries[: 1 + len(row.shape)])), placed_rows(metadata.spec)
    )
    multiple, _ = multiple_of(metadata.spec, sharding, metadata.lanes)
    most = _ROWS_PER_SHARD if metadata.rows is None else metadata.rows // multiple
    options = change(FeedOptions(source, multiple * min(_ROWS_PER_SHARD, max(1, most)), sharding))
    return Target(mesh, options, plan_of(metadata, metadata.spec, options, _devices(mesh, processes)), first)


def of_feed(name: str, make_feed: MakeFeed, axes: Mapping[str, int], processes: int, change: Change) -> Target:
    """The target for the feed that a function makes over the first devices, even if `Feed` refuses the options."""
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    asked: list[FeedOptions] = []
    refusal: Exception | None = None

    def changed(options: FeedOptions) -> FeedOptions:
        asked.append(change(options))
        return asked[-1]

    try:
        with build_feed(name, make_feed, mesh, changed) as feed:
            options = feed.options
    except (ValueError, TypeError) as error:
        if not asked:
            raise
        options, refusal = asked[-1], error
    metadata, first = first_rows(options.source)
    out = metadata.spec
    if options.transform is not None:
        out = transformed_spec(options.transform, out, [leaf[:1].copy() for leaf in first])
    return Target(mesh, options, plan_of(metadata, out, options, _devices(mesh, processes)), first, refusal)


def _devices(mesh: Mesh | AbstractMesh, processes: int) -> Any:
    return devices_by_process(NamedSharding(mesh, PartitionSpec()), processes)


def first_rows(source: Any) -> tuple[SourceMetadata, list[Array]]:
    """Open a source that `feedline.Feed` takes. Returns its metadata, and each leaf of its first rows."""
    found = opened(source)
    try:
        metadata = SourceMetadata.of(found)
        rows = min(len(found), _ROWS_SHOWN)
        first = [np.empty((rows, *leaf.shape), leaf.dtype) for leaf in metadata.spec.leaves]
        try:
            found.read(np.arange(rows, dtype=np.int64), metadata.spec.tree(first))
        except FeedError:
            raise
        except Exception as error:
            raise RowError(
                f"the first rows cannot be read: {type(error).__name__}: {error}", stage="read"
            ) from error
        return metadata, first
    finally:
        if found is not source:
            found.close()
