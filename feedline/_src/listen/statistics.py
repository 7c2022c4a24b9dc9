"""`Statistics`: an immutable snapshot of a feed's counts and times."""

from __future__ import annotations

import dataclasses

from feedline._src.listen.words import counted, milliseconds, percent


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
      wait_s: for how long the training loop waited in `next`; `wait_p50_s` and `wait_p99_s` are the median and the
        99th percentile of the latest waits (at most 256), `wait_max_s` is the longest of all.
      loop_s: the training loop's own time between two calls of `next`.
      transfer_s: the mean time, of the latest batches, from the begin of placing until all arrays are ready. None:
        not known yet.
      au: accelerator utilisation, 0 to 1, over the latest batches (at most 256) after those that were read ahead
        before the loop began: batches × device time of a step ÷ wall time. The device time is what is left without
        `wait_share`, and without the part of the loop's own time in which the devices were idle, once that is
        known. None: not known yet.
      wait_share: the share of the same time in which the devices were idle because the loop or its step waited for
        a batch. None: not known yet.
      ready: placed batches that wait to be delivered now.
      threads: threads that read rows with random access at a time; 0: workers, a stream or the caller read.
      workers: worker processes.
      restarts: workers that ended and were replaced: see `Reading.restart`.
      slabs: host buffers allocated so far, one for each leaf of a batch. They are used again, so the number
        soon stops growing.
      host_bytes: bytes of the host buffers that are allocated now; workers have their own.
      source_epochs: of a mixture, how often each source was read from the start of the run to the feed's position,
        by name: 1.5 is one and a half epochs of that source. None: the source is no mixture.
      tokens: without padding, from the start of the run to the feed's position, over all processes: by the name of
        the source of a mixture, else under "all". Rows that a remainder drops count once their epoch is over.
        None: the source does not know its tokens; `feedline.Packed` and `feedline.Ragged` do. A bad row that is
        masked or replaced counts with its own tokens, since processes know only their own bad rows.
      stores: what this process, with all of its feeds, asked of stores on the network: `requests`,
        including `retries` after an error; `fetched_bytes`; `cached`, blocks found on local disk; `wait_s`, time
        in which threads waited for blocks. Workers count for themselves. None: nothing.
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
    wait_s: float = 0.0
    wait_p50_s: float = 0.0
    wait_p99_s: float = 0.0
    wait_max_s: float = 0.0
    loop_s: float = 0.0
    transfer_s: float | None = None
    au: float | None = None
    wait_share: float | None = None
    ready: int = 0
    threads: int = 0
    workers: int = 0
    restarts: int = 0
    slabs: int = 0
    host_bytes: int = 0
    source_epochs: dict[str, float] | None = None
    tokens: dict[str, int] | None = None
    stores: dict[str, float] | None = None

    def __str__(self) -> str:
        """Counts, mean times of a batch in milliseconds, and what is in use, as text.

        Example:
          >>> print(Statistics(batches=120, rows=7_680, wait_s=0.06, read_s=0.24, au=0.93, threads=2, slabs=6))
          120 batches, 7,680 rows, 0 dropped, 0 bad, 0 bytes placed
          ms per batch: waited 0.500, loop 0.000, read 2.00, transform 0.000, stage 0.000, place 0.000
          ms waited: median 0.000, 99 % within 0.000, longest 0.000; AU 93 %
          now: 0 batches ready, 2 threads, 0 workers, 6 slabs, 0 bytes of host memory
        """
        from rich.filesize import decimal

        times = {"waited": self.wait_s, "loop": self.loop_s, "read": self.read_s, "transform": self.transform_s}
        times |= {"stage": self.stage_s, "place": self.place_s}
        each = [f"{name} {milliseconds(seconds / max(1, self.batches))}" for name, seconds in times.items()]
        au = "not known yet" if self.au is None else percent(self.au)
        lines = [
            f"{counted(self.batches, 'batch')}, {counted(self.rows, 'row')}, {self.dropped_rows:,} dropped, "
            f"{self.bad_rows:,} bad, {decimal(self.placed_bytes)} placed",
            f"ms per batch: {', '.join(each)}",
            f"ms waited: median {milliseconds(self.wait_p50_s)}, 99 % within {milliseconds(self.wait_p99_s)}, "
            f"longest {milliseconds(self.wait_max_s)}; AU {au}",
            f"now: {counted(self.ready, 'batch')} ready, {counted(self.threads, 'thread')}, "
            f"{counted(self.workers, 'worker')}, {counted(self.slabs, 'slab')}, "
            f"{decimal(self.host_bytes)} of host memory",
        ]
        lines += [f"epochs of {name}: {epochs:.4g}" for name, epochs in (self.source_epochs or {}).items()]
        lines += [f"tokens of {name}: {tokens:,}" for name, tokens in (self.tokens or {}).items()]
        if self.stores is not None:
            lines.append(f"stores: {', '.join(f'{name} {value:,g}' for name, value in self.stores.items())}")
        return "\n".join(lines)
