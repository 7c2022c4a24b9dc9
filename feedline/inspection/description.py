"""Composes the description of a feed from what a user asks for, without building it, for any mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from feedline.inspection.mesh import devices_of_processes
from feedline.inspection.problems import VALID, problems_of, why_no_mask
from feedline.inspection.reads import Blocks, ProcessReads, blocks_of, reads_of_process
from feedline.inspection.sizes import Memory, nearest_fitting
from feedline.inspection.subject import Subject, placed_tree
from feedline.pipeline.request import Request
from feedline.placement.place import broadcast, mask_spec
from feedline.placement.plan import check_divides, check_rank, shards_of

_ROWS_PER_SHARD = 8


@dataclasses.dataclass(frozen=True)
class Description:
    """Everything that `feedline inspect` says of a feed.

    Attributes:
      subject: what the source holds.
      request: what is asked for; with the batch size that was asked for.
      axes: names and sizes of the mesh axes.
      processes: how many.
      multiple: batch sizes that fit are multiples of this.
      shards: of the batch axis.
      problems: why a feed refuses this request, each with a change that works.
      batch: the leaves of a global batch, of the nearest batch size that fits, with shardings.
      names: of these leaves.
      reads: what each process supplies of that batch.
      blocks: what each device holds of it.
      ahead: batches that a process reads ahead: the buffer, or for a stream the window of docs/design.md, "Sizes".
      memory: of the feed, for the process that needs most.
    """

    subject: Subject
    request: Request
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
    def drawn_size(self) -> int:
        """The batch size for which reads, blocks and memory are computed."""
        return self.batch[0].shape[0]  # type: ignore[no-any-return]

    def lanes_of(self, reads: ProcessReads) -> list[int]:
        """The lanes of a stream of which a process supplies a row."""
        return _lanes_of(reads, self.drawn_size, self.subject.lanes)


def sharding_of(subject: Subject, mesh: jax.sharding.Mesh, entries: Sequence[Any]) -> Any:
    """The shardings of a batch: the entries of the spec, for each leaf as many as it has axes."""
    return jax.tree.map(
        lambda row: NamedSharding(mesh, PartitionSpec(*entries[: 1 + len(row.shape)])), placed_tree(subject)
    )


def default_batch_size(subject: Subject, sharding: Any) -> int:
    """Eight rows for each shard of the batch axis, or fewer if there are not as many rows."""
    multiple = _multiple(subject, sharding)[0]
    most = _ROWS_PER_SHARD if subject.rows is None else subject.rows // multiple
    return multiple * min(_ROWS_PER_SHARD, max(1, most))


def describe(subject: Subject, request: Request, mesh: jax.sharding.Mesh, processes: int) -> Description:
    """The description of a feed, without building it.

    Args:
      subject: what the source of `request` holds.
      request: what a feed is asked for; its shardings are over the devices of `mesh`.
      mesh: with the devices in the order of `jax.devices()`.
      processes: the number of processes that the devices are divided among.

    Raises:
      ValueError, TypeError: the sharding cannot divide the leaves, whatever the batch size.
    """
    request = request.checked()
    multiple, shards = _multiple(subject, request.sharding)
    size = nearest_fitting(request.batch_size, multiple)
    rows = placed_tree(subject)
    shardings = jax.tree.leaves(broadcast(request.sharding, rows))
    names = [leaf.name for leaf in subject.out.leaves]
    batch = []
    for row, sharding, name in zip(jax.tree.leaves(rows), shardings, names, strict=True):
        shape = (size, *row.shape)
        check_divides(sharding, shape, name)
        batch.append(jax.ShapeDtypeStruct(shape, row.dtype, sharding=sharding))
    problems = problems_of(subject, request, multiple, shards)
    if request.remainder == "pad" or request.reading.bad_rows == "mask":
        refusal = why_no_mask(rows)
        problems += [refusal] if refusal else []
        batch.append(mask_spec(batch, size))
        names.append(f"batch['{VALID}']")
    form = (subject.spec, subject.out, subject.transformed, _reads_columns(subject, request))
    used = {device for leaf in batch for device in leaf.sharding.device_set}
    reads = [
        reads_of_process(process, own, batch, names, form)
        for process, own in enumerate(devices_of_processes(list(mesh.devices.flat), processes))
        if used & set(own)
    ]
    ahead = _ahead(subject, request, size, reads)
    return Description(
        subject=subject,
        request=request,
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
        memory=_memory(request, batch, reads, ahead),
    )


def _multiple(subject: Subject, sharding: Any) -> tuple[int, int]:
    """What every batch size is a multiple of, and the number of shards of the batch axis."""
    rows = placed_tree(subject)
    shardings = jax.tree.leaves(broadcast(sharding, rows))
    counts = []
    for leaf, row, place in zip(subject.out.leaves, jax.tree.leaves(rows), shardings, strict=True):
        check_rank(place, (1, *row.shape), leaf.name)
        counts.append(shards_of(place, 1 + len(row.shape))[0])
    shards = math.lcm(*counts)
    return math.lcm(shards, max(1, subject.lanes)), shards


def _reads_columns(subject: Subject, request: Request) -> bool:
    """Where a bad row is replaced, each process that supplies any of it reads it whole."""
    return subject.reads_columns and request.reading.bad_rows == "raise"


def _memory(
    request: Request, batch: Sequence[jax.ShapeDtypeStruct], reads: Sequence[ProcessReads], ahead: int
) -> Memory:
    steps = request.steps_per_call
    local, read = (steps * max(getattr(each, name) for each in reads) for name in ("local_bytes", "read_bytes"))
    shard = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in batch)
    return Memory.of(local, read, steps * shard, ahead=ahead, prefetch=request.prefetch)


def _ahead(subject: Subject, request: Request, batch_size: int, reads: Sequence[ProcessReads]) -> int:
    if not subject.lanes:
        return request.reading.buffer
    lanes = {tuple(_lanes_of(each, batch_size, subject.lanes)) for each in reads}
    return 1 if len(lanes) == 1 else max(1, request.prefetch)


def _lanes_of(reads: ProcessReads, batch_size: int, lanes: int) -> list[int]:
    """The lanes of a stream of which a process supplies a row."""
    rows = np.concatenate([np.arange(*span) for span in reads.rows])
    return np.unique(rows * lanes // batch_size).tolist()  # type: ignore[no-any-return]
