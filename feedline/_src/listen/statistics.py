"""`Statistics`: an immutable snapshot of a feed's counts and times."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot, as `statistics()` of a `Feed` or of `prefetch_to_mesh` returns it.

    It counts what was delivered since the feed was built.

    Times are this process's, in seconds, summed over all batches. Those of threads are summed over threads, too,
    and so may be more than the time that passed.

    Attributes:
      batches: global batches delivered.
      rows: rows in these batches, over all processes, without padding.
      dropped_rows: rows that the remainder left out, over all processes.
      bad_rows: rows of this process that were bad and were replaced. They are counted in `rows`, too.
      placed_bytes: bytes that this process placed of these batches; ragged leaves count with the largest length.
      read_s: reading rows from the source.
      transform_s: in the transform.
      stage_s: getting host memory; casts, cuts and copies into it.
      place_s: in the JAX calls that place batches. Transfers continue afterwards.
      read_cpu_s, host_cpu_s, place_cpu_s: processor time of the threads and workers that read, that transform and
        stage, and that place. Of Grain's own threads it is unknown.
      slot_s: for how long batches waited in host memory until fewer than `prefetch` placed ones were waiting.
      queued_s: for how long placed batches waited until the training loop asked for them.
      wait_s: for how long the training loop waited in `next`; `wait_p50_s`, `wait_p99_s` and `wait_max_s` are the
        median, the 99th percentile (both to ±2.2 %) and the longest of these waits.
      loop_s: the training loop's own time between two calls of `next`.
      transfer_s: the mean time, of the latest batches, from the begin of placing until all arrays are ready. None:
        not known yet.
      au: accelerator utilisation, 0 to 1, over the latest batches (at most 256) after those that were read ahead
        before the loop began: batches × device time of a step ÷ wall time. The device time is what is left without
        `wait_share`, and without the part of the loop's own time in which the devices were idle, once that is
        known. None: not known yet.
      wait_share: the share of the same time in which the devices were idle because the loop or its step waited for
        a batch. None: not known yet.
      readiness: the share of the same time in which a placed batch was ready. None: not known yet.
      ready: placed batches that wait to be delivered now.
      threads: threads that read rows with random access at a time; 0: workers, a stream or the caller read.
      workers: worker processes.
      restarts: workers that ended and were replaced: see `Reading.restart`.
      slabs: host buffers allocated so far, one for each leaf of a batch. They are used again, so the number
        soon stops growing.
      host_bytes: bytes of the host buffers that are allocated now; workers have their own.
      source_epochs: of a mixture, how often each source was read from the start of the run to the feed's position,
        by name: 1.5 is one and a half epochs of that source. None: the source is no mixture.
      stores: what this process, with all of its feeds, asked of stores on the network: `requests`, of which
        `retries` followed an error and `hedged` were second ones because the first took long; `fetched_bytes`;
        `cached`, blocks found on local disk; `wait_s`, how long threads waited for blocks. Workers count for
        themselves. None: nothing.
    """

    batches: int = 0
    rows: int = 0
    dropped_rows: int = 0
    bad_rows: int = 0
    placed_bytes: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0
    stage_s: float = 0.0
    place_s: float = 0.0
    read_cpu_s: float = 0.0
    host_cpu_s: float = 0.0
    place_cpu_s: float = 0.0
    slot_s: float = 0.0
    queued_s: float = 0.0
    wait_s: float = 0.0
    wait_p50_s: float = 0.0
    wait_p99_s: float = 0.0
    wait_max_s: float = 0.0
    loop_s: float = 0.0
    transfer_s: float | None = None
    au: float | None = None
    wait_share: float | None = None
    readiness: float | None = None
    ready: int = 0
    threads: int = 0
    workers: int = 0
    restarts: int = 0
    slabs: int = 0
    host_bytes: int = 0
    source_epochs: dict[str, float] | None = None
    stores: dict[str, float] | None = None

    def __str__(self) -> str:
        """Counts, mean times of a batch, and what is in use, as text.

        Example:
          >>> print(Statistics(batches=120, rows=7_680, wait_s=0.06, read_s=0.24, au=0.93, threads=2, slabs=6))
          120 batches, 7,680 rows, 0 dropped, 0 bad, 0 B placed
          per batch: waited 500 µs, loop 0 s, read 2 ms, transform 0 s, stage 0 s, place 0 s
          waits: median 0 s, 99 % within 0 s, longest 0 s; AU 93 %
          now: 0 batches ready, 2 threads, 0 workers, 6 slabs, 0 B of host memory
        """
        times = {
            "waited": self.wait_s,
            "loop": self.loop_s,
            "read": self.read_s,
            "transform": self.transform_s,
            "stage": self.stage_s,
            "place": self.place_s,
        }
        each = ", ".join(f"{name} {with_unit(seconds / max(1, self.batches))}" for name, seconds in times.items())
        au = "not known yet" if self.au is None else f"{self.au:.0%}".replace("%", " %")
        return (
            f"{_counted(self.batches, 'batch', 'es')}, {_counted(self.rows, 'row')}, "
            f"{self.dropped_rows:,} dropped, {self.bad_rows:,} bad, {_bytes(self.placed_bytes)} placed\n"
            f"per batch: {each}\n"
            f"waits: median {with_unit(self.wait_p50_s)}, 99 % within {with_unit(self.wait_p99_s)}, "
            f"longest {with_unit(self.wait_max_s)}; AU {au}\n"
            f"now: {_counted(self.ready, 'batch', 'es')} ready, {_counted(self.threads, 'thread')}, "
            f"{_counted(self.workers, 'worker')}, {_counted(self.slabs, 'slab')}, "
            f"{_bytes(self.host_bytes)} of host memory"
            + (f"\nepochs of each source: {_epochs(self.source_epochs)}" if self.source_epochs else "")
            + (f"\nstores: {_stores(self.stores)}" if self.stores else "")
        )

    def _repr_html_(self) -> str:
        """All fields for a notebook, with units, and the sums of times also for one batch."""
        from feedline._src.notebook import table

        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            summed = field.name.endswith("_s") and field.name not in _NOT_SUMMED
            each = with_unit(value / self.batches) if summed and self.batches else ""
            rows.append((field.name, _readable(field.name, value), each))
        return table("feedline.Statistics", rows, ("", "in all", "a batch"))


_NOT_SUMMED = {"wait_p50_s", "wait_p99_s", "wait_max_s", "transfer_s"}


def _epochs(of_sources: dict[str, float]) -> str:
    """Example: web 1.25, code 0.5."""
    return ", ".join(f"{name} {epochs:.4g}" for name, epochs in of_sources.items())


def _stores(counts: dict[str, float]) -> str:
    """Example: 40 requests (1 repeated, 2 hedged), 80 MB fetched, 0 blocks cached, waited 1.5 s."""
    return (
        f"{_counted(int(counts['requests']), 'request')} ({counts['retries']:,} repeated, "
        f"{counts['hedged']:,} hedged), {_bytes(int(counts['fetched_bytes']))} fetched, "
        f"{_counted(int(counts['cached']), 'block')} cached, waited {with_unit(counts['wait_s'])}"
    )


def _readable(name: str, value: Any) -> str:
    """The value of a field with the unit that its name says."""
    if name == "source_epochs":
        return _epochs(value) if value else "no mixture"
    if name == "stores":
        return _stores(value) if value else "none"
    if value is None:
        return "not known yet"
    if name in ("au", "wait_share", "readiness"):
        return f"{value * 100:.0f} %"
    if name.endswith("_s"):
        return with_unit(value)
    return _bytes(int(value)) if name.endswith("_bytes") else f"{value:,}"


def _counted(count: int, thing: str, plural: str = "s") -> str:
    """Example: 1 batch, 2 batches."""
    return f"{count:,} {thing}{'' if count == 1 else plural}"


def with_unit(seconds: float) -> str:
    """Example: 500 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return "0 s"


def _bytes(count: int) -> str:
    """Example: 1.5 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


class Counters(NamedTuple):
    """The fields of `Statistics` that `next` counts itself. A tuple, because it is created for every batch."""

    batches: int = 0
    rows: int = 0
    dropped_rows: int = 0
    bad_rows: int = 0

    def plus(self, batches: int, rows: int, dropped_rows: int, bad_rows: int) -> Counters:
        """These counters after one more delivery."""
        return Counters(self[0] + batches, self[1] + rows, self[2] + dropped_rows, self[3] + bad_rows)
