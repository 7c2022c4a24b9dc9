"""Composes the description of a feed from what a user asks for, without building it, for any mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from feedline._src.feed_options import FeedOptions
from feedline._src.pipeline.settings import first_settings
from feedline._src.placement.place import broadcast, row_spec
from feedline._src.placement.plan import check_divides, check_rank, shards_of
from feedline._src.tools.inspect.contents import Contents, placed_tree
from feedline._src.tools.inspect.mesh import devices_of_processes
from feedline._src.tools.inspect.problems import VALID, problems_of, why_no_mask
from feedline._src.tools.inspect.reads import Blocks, ProcessReads, blocks_of, reads_of_process
from feedline._src.tools.inspect.sizes import Memory, fitting_size

_ROWS_PER_SHARD = 8


@dataclasses.dataclass(frozen=True)
class Description:
    """Everything that `feedline inspect` says of a feed.

    Attributes:
      contents: what the source holds.
      options: what is asked for; with the batch size that was asked for.
      axes: names and sizes of the mesh axes.
      processes: how many.
      multiple: batch sizes that fit are multiples of this.
      shards: of the batch axis.
      problems: why a feed refuses this, each with a change that works.
      batch: the leaves of a global batch, of the batch size or the next smaller one that fits, with shardings.
      names: of these leaves.
      reads: what each process supplies of that batch.
      blocks: what each device holds of it.
      ahead: batches that a process reads ahead: the buffer, or for a stream the window of docs/design.md, "Sizes".
      memory: of the feed, for the process that needs most.
    """

    contents: Contents
    options: FeedOptions
    axes: dict[str, int]
    processes: int
    multiple: int
    shards: int
    problems: list[str]
    batch: list[jax.ShapeDtypeStruct]
    names: list[str]
    reads: list[ProcessReads]
    blocks: list[Blocks]
    ahead: int
    memory: Memory

    @property
    def described_size(self) -> int:
        """The batch size for which reads, blocks and memory are computed."""
        return self.batch[0].shape[0]  # type: ignore[no-any-return]

    def lanes_of(self, reads: ProcessReads) -> list[int]:
        """The lanes of a stream of which a process supplies a row."""
        return _lanes_of(reads, self.described_size, self.contents.lanes)


def sharding_of(contents: Contents, mesh: jax.sharding.Mesh, entries: Sequence[Any]) -> Any:
    """The shardings of a batch: the entries of the spec, for each leaf as many as it has axes."""
    return jax.tree.map(
        lambda row: NamedSharding(mesh, PartitionSpec(*entries[: 1 + len(row.shape)])), placed_tree(contents)
    )


def default_batch_size(contents: Contents, sharding: Any) -> int:
    """Eight rows for each shard of the batch axis, or fewer if there are not as many rows."""
    multiple = _multiple(contents, sharding)[0]
    most = _ROWS_PER_SHARD if contents.rows is None else contents.rows // multiple
    return multiple * min(_ROWS_PER_SHARD, max(1, most))


def describe(contents: Contents, options: FeedOptions, mesh: jax.sharding.Mesh, processes: int) -> Description:
    """The description of a feed, without building it.

    Args:
      contents: what the source of `options` holds.
      options: what a feed is asked for; its shardings are over the devices of `mesh`.
      mesh: with the devices in the order of `jax.devices()`.
      processes: the number of processes that the devices are divided among.

    Raises:
      ValueError, TypeError: the sharding cannot divide the leaves, whatever the batch size.
    """
    multiple, shards = _multiple(contents, options.sharding)
    size = fitting_size(options.first_batch_size, multiple)
    batch = []
    for name, row, sharding in _leaves(contents, options.sharding):
        check_divides(sharding, (size, *row.shape), name)
        batch.append(jax.ShapeDtypeStruct((size, *row.shape), row.dtype, sharding=sharding))
    names = [leaf.name for leaf in contents.out.leaves]
    problems = problems_of(contents, options, multiple, shards)
    if options.remainder == "pad" or options.reading.bad_rows == "mask":
        refusal = why_no_mask(placed_tree(contents))
        problems += [refusal] if refusal else []
        batch.append(row_spec(batch, size))
        names.append(f"batch['{VALID}']")
    if options.with_place:
        batch.append(row_spec(batch, size, np.int32))
        names.append("batch['place']")
    reads = _reads(contents, options, batch, names, devices_of_processes(list(mesh.devices.flat), processes))
    ahead = _ahead(contents, options, size, reads)
    return Description(
        contents=contents,
        options=options,
        axes=dict(mesh.shape),
        processes=processes,
        multiple=multiple,
        shards=shards,
        problems=problems,
        batch=batch,
        names=names,
        reads=reads,
        blocks=blocks_of(batch),
        ahead=ahead,
        memory=_memory(options, batch, reads, ahead),
    )


def _leaves(
    contents: Contents, sharding: Any
) -> Iterator[tuple[str, jax.ShapeDtypeStruct, jax.sharding.Sharding]]:
    """Name, form of a row, and sharding of each leaf of a batch."""
    rows = placed_tree(contents)
    shardings = jax.tree.leaves(broadcast(sharding, rows))
    names = [leaf.name for leaf in contents.out.leaves]
    return zip(names, jax.tree.leaves(rows), shardings, strict=True)


def _multiple(contents: Contents, sharding: Any) -> tuple[int, int]:
    """What every batch size is a multiple of, and the number of shards of the batch axis."""
    shards = 1
    for name, row, place in _leaves(contents, sharding):
        check_rank(place, (1, *row.shape), name)
        shards = math.lcm(shards, shards_of(place, 1 + len(row.shape))[0])
    return math.lcm(shards, max(1, contents.lanes)), shards


def _reads(
    contents: Contents,
    options: FeedOptions,
    batch: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    processes: Sequence[Sequence[Any]],
) -> list[ProcessReads]:
    """What each process supplies that owns a device of the batch."""
    used = {device for leaf in batch for device in leaf.sharding.device_set}
    # where a bad row is replaced, each process that supplies any of it reads it whole
    reads_columns = contents.reads_columns and options.reading.bad_rows == "raise"
    return [
        reads_of_process(process, devices, batch, names, contents, reads_columns)
        for process, devices in enumerate(processes)
        if not used.isdisjoint(devices)
    ]


def _memory(
    options: FeedOptions, batch: Sequence[jax.ShapeDtypeStruct], reads: Sequence[ProcessReads], ahead: int
) -> Memory:
    shard = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in batch)
    steps = options.steps_per_call
    return Memory.of(
        steps * max(each.local_bytes for each in reads),
        steps * max(each.read_bytes for each in reads),
        steps * shard,
        ahead=ahead,
        prefetch=first_settings(options).prefetch,
    )


def _ahead(contents: Contents, options: FeedOptions, batch_size: int, reads: Sequence[ProcessReads]) -> int:
    if not contents.lanes:
        return first_settings(options).buffer
    lanes = {tuple(_lanes_of(each, batch_size, contents.lanes)) for each in reads}
    return 1 if len(lanes) == 1 else max(1, first_settings(options).prefetch)


def _lanes_of(reads: ProcessReads, batch_size: int, lanes: int) -> list[int]:
    """The lanes of a stream of which a process supplies a row."""
    rows = np.concatenate([np.arange(*span) for span in reads.rows])
    return np.unique(rows * lanes // batch_size).tolist()  # type: ignore[no-any-return]
