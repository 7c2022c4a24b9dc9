"""The metrics of a feed: one table of names, help texts and values, for Prometheus and for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

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
      short: its name without "feedline_". It ends with the unit (seconds, bytes, ratio; none: a plain number);
        that of a counter ends with "_total".
      help: what it measures.
      of: a field of `Statistics`, or fields by label; or statistics and, if there is one, a report → the values by
        label.
      label: the label that its values have, such as "stage"; "": it has one value.
    """

    short: str
    help: str
    of: str | Mapping[str, str] | Callable[[Statistics, Report | None], _Values]
    label: str = ""

    @property
    def name(self) -> str:
        """For Prometheus."""
        return f"feedline_{self.short}"

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
        if isinstance(self.of, str):
            return {"": _field(statistics, self.of)}
        if isinstance(self.of, Mapping):
            return {label: _field(statistics, field) for label, field in self.of.items()}
        return self.of(statistics, report)


def _field(statistics: Statistics, name: str) -> Any:
    """A field of the statistics; "stores.requests" is the entry of that name in `stores`."""
    name, _, key = name.partition(".")
    value = getattr(statistics, name)
    return value[key] if key and value is not None else value


def _store_requests(stores: dict[str, float] | None) -> _Values:
    if stores is None:
        return {}
    return {"first": stores["requests"] - stores["retries"], "retry": stores["retries"]}


METRICS = (
    Metric("batches_total", "Global batches delivered.", "batches"),
    Metric("rows_total", "Rows delivered, over all processes, without padding.", "rows"),
    Metric("dropped_rows_total", "Rows that the remainder left out, over all processes.", "dropped_rows"),
    Metric("bad_rows_total", "Bad rows of this process that were replaced.", "bad_rows"),
    Metric("placed_bytes_total", "Bytes that this process placed on its devices.", "placed_bytes"),
    Metric("worker_restarts_total", "Worker processes that ended and were replaced.", "restarts"),
    Metric("wait_seconds_total", "Time for which the training loop waited in next().", "wait_s"),
    Metric("loop_seconds_total", "The training loop's own time between two calls of next().", "loop_s"),
    Metric(
        "stage_seconds_total",
        "Time of a stage, summed over its threads: read (rows), transform, stage (casts and copies into host "
        "buffers), place (the calls that place batches).",
        {"read": "read_s", "transform": "transform_s", "stage": "stage_s", "place": "place_s"},
        "stage",
    ),
    Metric(
        "stage_cpu_seconds_total",
        "Processor time of a stage: read, host (transform and stage), place.",
        {"read": "read_cpu_s", "host": "host_cpu_s", "place": "place_cpu_s"},
        "stage",
    ),
    Metric(
        "au_ratio",
        "Accelerator utilisation: the share of the time in which the devices computed, as far as that is known.",
        "au",
    ),
    Metric("wait_ratio", "Share of the time in which the loop or its step waited for a batch.", "wait_share"),
    Metric("wait_p50_seconds", "The median of the latest waits in next().", "wait_p50_s"),
    Metric("wait_p99_seconds", "The 99th percentile of the latest waits in next().", "wait_p99_s"),
    Metric("wait_max_seconds", "The longest wait in next().", "wait_max_s"),
    Metric("transfer_seconds", "Mean time from the begin of placing until all arrays are ready.", "transfer_s"),
    Metric("ready_batches", "Placed batches that wait to be delivered.", "ready"),
    Metric("threads", "Threads that read rows.", "threads"),
    Metric("workers", "Worker processes that read rows.", "workers"),
    Metric("host_buffers", "Host buffers allocated so far.", "slabs"),
    Metric("host_bytes", "Bytes of the host buffers allocated now.", "host_bytes"),
    Metric(
        "source_epochs",
        "How often each source of a mixture was read, from the start of the run to the feed's position.",
        lambda s, r: s.source_epochs or {},
        "source",
    ),
    Metric(
        "tokens_total",
        "Tokens without padding, from the start of the run to the feed's position, over all processes.",
        lambda s, r: s.tokens or {},
        "source",
    ),
    Metric(
        "store_requests_total",
        "Requests of this process to stores: first, retry (after an error).",
        lambda s, r: _store_requests(s.stores),
        "request",
    ),
    Metric("store_fetched_bytes_total", "Bytes that were fetched from stores.", "stores.fetched_bytes"),
    Metric("store_cached_blocks_total", "Blocks that were found in the cache on local disk.", "stores.cached"),
    Metric("store_wait_seconds_total", "Time for which threads waited for blocks from stores.", "stores.wait_s"),
    Metric(
        "bound",
        "1 for what limits training, 0 for all else: read, host (transform, casts and copies), place, compute "
        "(the training step), loop (the program's own Python), straggler (another process).",
        lambda s, r: {} if r is None else {bound: float(bound == r.bound) for bound in get_args(Bound)},
        "bound",
    ),
    Metric(
        "headroom_ratio",
        "How many times as fast as the training loop a stage would be alone: read, host, place; and compute, the "
        "loop without waiting. At most 1: this stage makes the loop wait.",
        lambda s, r: {} if r is None else r.headroom,
        "stage",
    ),
)
"""All metrics. Totals count from when the feed was built; ratios, percentiles and means are of late batches."""


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
