"""The metrics of a feed: one table of names, help texts and values, for Prometheus and for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, Protocol, get_args

from feedline._src.listen.report import Bound, Report
from feedline._src.listen.statistics import Statistics

_Values = Mapping[str, float | None]
"""By value of the label; "" where there is no label. None: not known yet."""


class HasStatistics(Protocol):
    """A feed, or anything else that counts like one."""

    def statistics(self) -> Statistics: ...


class Metric(NamedTuple):
    """One metric of a feed.

    Attributes:
      name: for Prometheus. It ends with the unit (seconds, bytes, ratio; none: a plain number); that of a counter
        ends with "_total".
      help: what it measures.
      of: a field of `Statistics`; or statistics and, if there is one, a report → the values by label.
      label: the label that its values have, such as "stage"; "": it has one value.
    """

    name: str
    help: str
    of: str | Callable[[Statistics, Report | None], _Values]
    label: str = ""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """A counter only grows; a gauge is the present value."""
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def unit(self) -> str:
        """ "seconds", "bytes", "ratio" (0 to 1, or a multiple), or "" for a plain number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in ("seconds", "bytes", "ratio") else ""

    def values(self, statistics: Statistics, report: Report | None) -> _Values:
        """The values by label, "" if the metric has none."""
        return {"": getattr(statistics, self.of)} if isinstance(self.of, str) else self.of(statistics, report)


def _of_stores(of: Callable[[dict[str, float]], _Values]) -> Callable[[Statistics, Report | None], _Values]:
    return lambda statistics, report: {} if statistics.stores is None else of(statistics.stores)


def _requests(stores: dict[str, float]) -> _Values:
    again = {"retry": stores["retries"], "hedge": stores["hedged"]}
    return {"first": stores["requests"] - sum(again.values()), **again}


METRICS = (
    Metric("feedline_batches_total", "Global batches delivered.", "batches"),
    Metric("feedline_rows_total", "Rows delivered, over all processes, without padding.", "rows"),
    Metric("feedline_dropped_rows_total", "Rows that the remainder left out, over all processes.", "dropped_rows"),
    Metric("feedline_bad_rows_total", "Bad rows of this process that were replaced.", "bad_rows"),
    Metric("feedline_placed_bytes_total", "Bytes that this process placed on its devices.", "placed_bytes"),
    Metric("feedline_worker_restarts_total", "Worker processes that ended and were replaced.", "restarts"),
    Metric("feedline_wait_seconds_total", "Time for which the training loop waited in next().", "wait_s"),
    Metric("feedline_loop_seconds_total", "The training loop's own time between two calls of next().", "loop_s"),
    Metric(
        "feedline_stage_seconds_total",
        "Time of a stage, summed over its threads: read (rows), transform, stage (casts and copies into host "
        "buffers), place (the calls that place batches).",
        lambda s, r: {"read": s.read_s, "transform": s.transform_s, "stage": s.stage_s, "place": s.place_s},
        "stage",
    ),
    Metric(
        "feedline_stage_cpu_seconds_total",
        "Processor time of a stage: read, host (transform and stage), place.",
        lambda s, r: {"read": s.read_cpu_s, "host": s.host_cpu_s, "place": s.place_cpu_s},
        "stage",
    ),
    Metric(
        "feedline_slot_seconds_total",
        "Time for which batches waited in host memory until they could be placed.",
        "slot_s",
    ),
    Metric(
        "feedline_queued_seconds_total",
        "Time for which placed batches waited until the training loop asked for them.",
        "queued_s",
    ),
    Metric(
        "feedline_au_ratio",
        "Accelerator utilisation over the latest batches (at most 256): the share of the time in which the "
        "devices computed, as far as that is known.",
        "au",
    ),
    Metric(
        "feedline_wait_ratio",
        "The share of the same time in which the training loop or its step waited for a batch.",
        "wait_share",
    ),
    Metric(
        "feedline_readiness_ratio",
        "The share of the time of the latest batches in which a placed batch was ready.",
        "readiness",
    ),
    Metric(
        "feedline_wait_p50_seconds", "The median time that the training loop waited for a batch.", "wait_p50_s"
    ),
    Metric(
        "feedline_wait_p99_seconds",
        "The 99th percentile of the times that the training loop waited for a batch.",
        "wait_p99_s",
    ),
    Metric(
        "feedline_wait_max_seconds", "The longest time that the training loop waited for a batch.", "wait_max_s"
    ),
    Metric(
        "feedline_transfer_seconds",
        "The mean time, of the latest batches, from the begin of placing until all arrays are ready.",
        "transfer_s",
    ),
    Metric("feedline_ready_batches", "Placed batches that wait to be delivered.", "ready"),
    Metric("feedline_threads", "Threads that read rows.", "threads"),
    Metric("feedline_workers", "Worker processes that read rows.", "workers"),
    Metric("feedline_host_buffers", "Host buffers allocated so far.", "slabs"),
    Metric("feedline_host_bytes", "Bytes of the host buffers allocated now.", "host_bytes"),
    Metric(
        "feedline_source_epochs",
        "How often each source of a mixture was read, from the start of the run to the feed's position.",
        lambda s, r: s.source_epochs or {},
        "source",
    ),
    Metric(
        "feedline_store_requests_total",
        "Requests of this process to stores: first, retry (after an error), hedge (the first took long).",
        _of_stores(_requests),
        "request",
    ),
    Metric(
        "feedline_store_fetched_bytes_total",
        "Bytes that this process fetched from stores.",
        _of_stores(lambda c: {"": c["fetched_bytes"]}),
    ),
    Metric(
        "feedline_store_cached_blocks_total",
        "Blocks of objects in stores that this process found in the cache on local disk.",
        _of_stores(lambda c: {"": c["cached"]}),
    ),
    Metric(
        "feedline_store_wait_seconds_total",
        "Time for which threads of this process waited for blocks from stores.",
        _of_stores(lambda c: {"": c["wait_s"]}),
    ),
    Metric(
        "feedline_bound",
        "1 for what limits training, 0 for all else: read, host (transform, casts and copies), place, compute "
        "(the training step), loop (the program's own Python), straggler (another process).",
        lambda s, r: {} if r is None else {bound: float(bound == r.bound) for bound in get_args(Bound)},
        "bound",
    ),
    Metric(
        "feedline_headroom_ratio",
        "How many times as fast as the training loop a stage would be alone: read, host, place; and compute, the "
        "loop without waiting. At most 1: this stage makes the loop wait.",
        lambda s, r: {} if r is None else r.headroom,
        "stage",
    ),
)
"""All metrics. Percentiles and totals count from when the feed was built."""


def samples(statistics: Statistics, report: Report | None = None) -> Iterator[tuple[Metric, str, float]]:
    """Each value that is known, with its metric and the value of the metric's label, "" if it has none.

    Example:
      >>> known = {(m.name, label): value for m, label, value in samples(Statistics(batches=3, read_s=0.5))}
      >>> known["feedline_batches_total", ""], known["feedline_stage_seconds_total", "read"]
      (3, 0.5)
      >>> ("feedline_au_ratio", "") in known  # not known before some batches were delivered
      False
    """
    for metric in METRICS:
        for label, value in metric.values(statistics, report).items():
            if value is not None:
                yield metric, label, value


def scalars(now: Statistics, before: Statistics | None = None, elapsed_s: float = 0.0) -> dict[str, float]:
    """The metrics as scalars for TensorBoard: gauges as they are now, and counters as rates since `before`.

    A name is that of Prometheus with slashes. A counter of seconds is given per batch, any other per second.

    Example:
      >>> before, now = Statistics(batches=10, rows=640, read_s=1.0), Statistics(batches=30, rows=1920, read_s=2.0)
      >>> found = scalars(now, before, elapsed_s=4.0)
      >>> found["feedline/rows_per_second"], found["feedline/stage_seconds_per_batch/read"]
      (320.0, 0.05)
    """
    earlier = {} if before is None else {(m.name, label): value for m, label, value in samples(before)}
    batches = now.batches - (before.batches if before is not None else now.batches)
    found = {}
    for metric, label, value in samples(now):
        name = metric.name.removesuffix("_total").replace("feedline_", "feedline/", 1)
        if metric.kind == "counter":
            per, by = ("batch", batches) if metric.unit == "seconds" else ("second", elapsed_s)
            if before is None or by <= 0:
                continue
            name, value = f"{name}_per_{per}", (value - earlier.get((metric.name, label), 0.0)) / by
        found[f"{name}/{label}" if label else name] = value
    return found


def check_feed(feed: object) -> None:
    """Refuse what has no statistics.

    Raises:
      TypeError: the object has no method `statistics`.
    """
    if not callable(getattr(feed, "statistics", None)):
        raise TypeError(
            f"feed must have a method statistics(), as a feedline.Feed has, got {feed!r}; give the feed itself"
        )
