"""`Statistics`: a snapshot of a feed's counts and times; and its metrics, for Prometheus and TensorBoard.

A metric is declared once: at the field of `Statistics` that holds its value, or below the class if it is computed.
"""

# ruff: noqa: RUF009  (`_field` returns `dataclasses.field`)

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from feedline._src.listen.report import BOUNDS

if TYPE_CHECKING:
    from feedline._src.listen.report import Report


class Metric(NamedTuple):
    """One metric of a feed.

    Attributes:
      name: the name in Prometheus. It ends with the unit: "seconds", "bytes", "ratio", or nothing for a plain
        number. The name of a counter ends with "_total" after the unit.
      label: the label that tells its values apart, such as "stage"; "": it has one value.
    """

    name: str
    help: str
    label: str = ""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """A counter only grows; a gauge shows the present value."""
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def unit(self) -> str:
        """ "seconds", "bytes", "ratio" (a share or a factor), or "" for a plain number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in ("seconds", "bytes", "ratio") else ""


def _field(name: str, help: str, default: float | None = 0, *, label: str = "", value: str = "") -> Any:
    """A field with the value of a metric: the only one, the one for label `value`, or a dict {label: value}."""
    metric = Metric(f"feedline_{name}", help, label)
    return dataclasses.field(default=default, metadata={"metric": metric, "value": value})


_STAGE = (
    "stage_seconds_total",
    'Time of each stage, summed over its threads: "read" (rows), "transform", "stage" (casts and copies into host '
    'buffers), "place" (the calls that place batches).',
)
_STAGE_CPU = "stage_cpu_seconds_total", 'Processor time by stage: "read", "host" ("transform", "stage"), "place".'


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot of counts and times, as `statistics()` of a `Feed` or of `prefetch_to_mesh` returns it.

    Counts begin when the feed is built. Times are seconds of this process, summed over all batches. The times of
    stages are also summed over threads, so they may exceed the elapsed time. "Latest" means at most 256 batches,
    none of which was read before the loop began. None: not known, or not known yet.

    `rows` includes bad rows. `placed_bytes` counts ragged leaves at their largest length. `place_s` is the time in
    JAX's calls; transfers may take longer. The host buffers of worker processes are not counted, and neither is
    the processor time of Grain's own threads, which is unknown. `au`, 0 to 1, is device time ÷ wall time: all time
    except the share `wait_share` and, once known, the part of the loop's own time in which the devices were idle.

    `tokens` has one entry "all" or, for a mixture, one entry per source, by name. Only `feedline.Packed` and
    `feedline.Ragged` know their tokens. Rows that fill no batch count once the epoch ends. A masked
    or replaced row still counts with its own tokens: no process knows the bad rows of the others.

    Example:
      >>> print(Statistics(batches=120, tokens={"web": 5000}, au=0.93))  # doctest: +ELLIPSIS
      batches                             120
      ...
      au                             0.930000
      ...
      tokens web                        5,000

    Attributes:
      stores: what all feeds of this process, without their workers, requested from stores: `requests`, including
        `retries` (after an error) and `hedged` ones (sent because the first request took long); `fetched_bytes`;
        `cached`, blocks found on local disk; `wait_s`, time for which threads waited for blocks.
    """

    batches: int = _field("batches_total", "Global batches delivered.")
    rows: int = _field("rows_total", "Rows delivered, over all processes, without padding.")
    dropped_rows: int = _field("dropped_rows_total", "Rows that filled no batch, over all processes.")
    bad_rows: int = _field("bad_rows_total", "Bad rows of this process that were masked or replaced.")
    placed_bytes: int = _field("placed_bytes_total", "Bytes that this process placed on its devices.")
    restarts: int = _field("worker_restarts_total", "Worker processes that ended and were replaced.")
    wait_s: float = _field("wait_seconds_total", "Time for which the training loop waited in next().", 0.0)
    loop_s: float = _field("loop_seconds_total", "The training loop's own time between two calls of next().", 0.0)
    read_s: float = _field(*_STAGE, 0.0, label="stage", value="read")
    transform_s: float = _field(*_STAGE, 0.0, label="stage", value="transform")
    stage_s: float = _field(*_STAGE, 0.0, label="stage", value="stage")
    place_s: float = _field(*_STAGE, 0.0, label="stage", value="place")
    read_cpu_s: float = _field(*_STAGE_CPU, 0.0, label="stage", value="read")
    host_cpu_s: float = _field(*_STAGE_CPU, 0.0, label="stage", value="host")
    place_cpu_s: float = _field(*_STAGE_CPU, 0.0, label="stage", value="place")
    au: float | None = _field(
        "au_ratio",
        "Accelerator utilisation: the share of the time in which the devices computed, as far as that is known.",
        None,
    )
    wait_share: float | None = _field(
        "wait_ratio",
        "Share of the time in which the loop waited for a batch, or a step waited for the transfer of its batch.",
        None,
    )
    wait_p50_s: float = _field("wait_p50_seconds", "The median of the latest waits in next().", 0.0)
    wait_p99_s: float = _field("wait_p99_seconds", "The 99th percentile of the latest waits in next().", 0.0)
    wait_max_s: float = _field("wait_max_seconds", "The longest wait in next().", 0.0)
    transfer_s: float | None = _field(
        "transfer_seconds", "Mean time from the start of placing until all arrays are ready.", None
    )
    ready: int = _field("ready_batches", "Placed batches that wait to be delivered.")
    threads: int = _field("threads", "Threads that read rows.")
    workers: int = _field("workers", "Worker processes that read rows.")
    slabs: int = _field("host_buffers", "Host buffers allocated so far.")
    host_bytes: int = _field("host_bytes", "Bytes of the host buffers allocated now.")
    source_epochs: dict[str, float] | None = _field(
        "source_epochs",
        "How often each source of a mixture was read, from the start of epoch 0 to the feed's position.",
        None,
        label="source",
    )
    tokens: dict[str, int] | None = _field(
        "tokens_total",
        "Tokens without padding, from the start of epoch 0 to the feed's position, over all processes.",
        None,
        label="source",
    )
    stores: dict[str, float] | None = None

    def __str__(self) -> str:
        """A line for each known value."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for key, each in (value if isinstance(value, dict) else {"": value}).items():
                if each is not None:
                    number = f"{each:,}" if isinstance(each, int) else f"{each:,.6f}"
                    lines.append(f"{f'{field.name} {key}':<20}{number:>19}")
        return "\n".join(lines)


_STORE_REQUESTS = Metric(
    "feedline_store_requests_total",
    "Requests of this process to stores: first, retry (after an error), hedge (the first took long).",
    "request",
)
_STORES = {
    "fetched_bytes": Metric("feedline_store_fetched_bytes_total", "Bytes that were fetched from stores."),
    "cached": Metric("feedline_store_cached_blocks_total", "Blocks that were found in the cache on local disk."),
    "wait_s": Metric("feedline_store_wait_seconds_total", "Time for which threads waited for blocks from stores."),
}
_BOUND = Metric(
    "feedline_bound",
    f"1 for what limits training, 0 for the rest. {' '.join(f'{name}: {what}.' for name, what in BOUNDS.items())}",
    "bound",
)
_HEADROOM = Metric(
    "feedline_headroom_ratio",
    "Speed of read, host or place alone ÷ speed of the loop without waiting; 1 or less: this stage makes the loop "
    "wait. For compute: speed of the loop without waiting ÷ its speed now.",
    "stage",
)
_FIELDS = [field for field in dataclasses.fields(Statistics) if field.metadata]
_DESCRIBED = "".join(f"\n  {field.name}: {field.metadata['metric'].help}" for field in _FIELDS)
Statistics.__doc__ = inspect.cleandoc(Statistics.__doc__ or "") + _DESCRIBED
METRICS = (
    *dict.fromkeys(field.metadata["metric"] for field in _FIELDS),
    *(_STORE_REQUESTS, *_STORES.values(), _BOUND, _HEADROOM),
)
"""All metrics. Ratios, percentiles and means cover the latest batches; for totals see `Statistics`."""


def samples(statistics: Statistics, report: Report | None = None) -> Iterator[tuple[Metric, str, float]]:
    """(metric, label, value) for each value that is known. `label` is "" if the metric has no label.

    Example:
      >>> known = {(m.name, label): value for m, label, value in samples(Statistics(batches=3, read_s=0.5))}
      >>> known["feedline_batches_total", ""], known["feedline_stage_seconds_total", "read"]
      (3, 0.5)
      >>> ("feedline_au_ratio", "") in known  # not known before some batches were delivered
      False
    """
    for field in _FIELDS:
        metric, value = field.metadata["metric"], getattr(statistics, field.name)
        if value is not None:
            values = value if isinstance(value, dict) else {field.metadata["value"]: value}
            yield from ((metric, label, each) for label, each in values.items())
    if (stores := statistics.stores) is not None:
        yield _STORE_REQUESTS, "first", stores["requests"] - stores["retries"] - stores["hedged"]
        yield _STORE_REQUESTS, "retry", stores["retries"]
        yield _STORE_REQUESTS, "hedge", stores["hedged"]
        yield from ((metric, "", stores[name]) for name, metric in _STORES.items())
    if report is not None:
        yield from ((_BOUND, bound, float(bound == report.bound)) for bound in BOUNDS)
        yield from ((_HEADROOM, stage, headroom) for stage, headroom in report.headroom.items())


def scalars(now: Statistics, before: Statistics | None = None, elapsed_s: float = 0.0) -> dict[str, float]:
    """The metrics as scalars for TensorBoard: gauges as they are now, and counters as rates since `before`.

    The names are as in Prometheus, with slashes. Counters of seconds are per batch, other counters per second.

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


class HasStatistics(Protocol):
    """A feed, or any other object that has statistics."""

    def statistics(self) -> Statistics:
        """Return a snapshot of its counts and times."""


def check_feed(feed: object) -> None:
    """Refuse an object that has no statistics.

    Raises:
      TypeError: the object has no method `statistics`.
    """
    if not callable(getattr(feed, "statistics", None)):
        raise TypeError(
            f"feed must have a method statistics(), as a feedline.Feed has, got {feed!r}; give the feed itself"
        )
