"""Serves the metrics of feeds to Prometheus. A thread of the server reads them whenever Prometheus asks."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from feedline._src.listen.report import report_of
from feedline._src.listen.statistics import METRICS, HasStatistics, Metric, check_feed, samples
from feedline._src.options import checked_integer

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name != "prometheus_client":
        raise
    raise ImportError(
        "metrics for Prometheus need prometheus_client, which is not installed; from the clone: "
        "pip install '.[prometheus]'"
    ) from error

_PORT = 9464  # the port of OpenTelemetry's exporters; NVIDIA's exporter uses 9400
_Family = CounterMetricFamily | GaugeMetricFamily


def serve(
    feeds: HasStatistics | Mapping[str, HasStatistics], port: int = _PORT, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve the metrics of one or several feeds at `http://host:port/metrics`, until the result is closed.

    The training thread does no work for this. A closed feed is still served; a garbage-collected feed is not.

    Args:
      feeds: a feed, which gets the label feed="train"; or a dict {value of the label: feed}.
      port: each process of a machine needs its own port, such as `9464 + jax.process_index()`. 0: any free port.
      host: the address to listen on. "0.0.0.0": all addresses of this machine, without any protection.

    Raises:
      OSError: the port is in use, or the address is not this machine's.
      ValueError, TypeError: an argument is wrong.

    Example:
      >>> import urllib.request, numpy as np, feedline
      >>> feed = feedline.Feed({"x": np.zeros((160, 2))}, 16, jax.devices()[0])
      >>> with serve(feed, port=0) as server:
      ...     batches = [batch for _, batch in zip(range(3), feed)]
      ...     text = urllib.request.urlopen(server.url).read().decode()
      >>> print(*[line for line in text.splitlines() if line.startswith("feedline_batches")])
      feedline_batches_total{feed="train",process="0"} 3.0
      >>> feed.close()
    """
    checked_integer("port", port, at_least=0, at_most=65535)
    registry = CollectorRegistry()
    registry.register(FeedCollector(feeds))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(
            error.errno,
            f"metrics need an address of this machine and a port that no program listens on, but {host}:{port} "
            f"cannot be used: {error.strerror}; give another port, or port=0 for a free one",
        ) from error
    return MetricsServer(server, thread, host)


class MetricsServer(contextlib.AbstractContextManager["MetricsServer"]):
    """The server that `serve` started. Its thread ends with the process, or on `close`, which any thread may call.

    Attributes:
      port: the port on which it listens.
      url: the address that Prometheus, or a browser, reads.
    """

    def __init__(self, server: Any, thread: threading.Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening, which takes up to half a second. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()


class FeedCollector(Collector):
    """Collects the metrics of feeds for a registry of your own, which serves them beside your own metrics.

    A collector has only weak references to its feeds. A registry accepts only one `FeedCollector`, so pass all
    feeds to the same one.

    Args:
      feeds: as for `serve`.

    Raises:
      ValueError, TypeError: `feeds` is neither a feed nor a dict of feeds.

    Example:
      >>> import numpy as np, feedline
      >>> registry = CollectorRegistry()
      >>> with feedline.Feed({"x": np.zeros((160, 2))}, 16, jax.devices()[0]) as feed:
      ...     registry.register(FeedCollector({"mine": feed}))
      ...     registry.get_sample_value("feedline_rows_total", {"feed": "mine", "process": "0"})
      0
    """

    def __init__(self, feeds: HasStatistics | Mapping[str, HasStatistics]) -> None:
        named = feeds if isinstance(feeds, Mapping) else {"train": feeds}
        if not named or not all(isinstance(name, str) and name for name in named):
            raise ValueError(f"feeds must be a feed, or feeds by name, such as {{'train': feed}}, got {feeds!r}")
        for feed in named.values():
            check_feed(feed)
        self._feeds = {name: weakref.ref(feed) for name, feed in named.items()}
        self._process = str(jax.process_index())

    def describe(self) -> Iterable[_Family]:
        """All metrics without values, for a registry."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterable[_Family]:
        """All metrics with their present values. Called when Prometheus asks."""
        families = {metric.name: _family(metric) for metric in METRICS}
        for name, reference in self._feeds.items():
            if (feed := reference()) is not None:
                for metric, label, value in samples(feed.statistics(), report_of(feed)):
                    labels = [name, self._process, *([label] if metric.label else [])]
                    families[metric.name].add_metric(labels, value)
        return families.values()


def _family(metric: Metric) -> _Family:
    labels = ["feed", "process", *([metric.label] if metric.label else [])]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name.removesuffix("_total"), metric.help, labels=labels, unit=metric.unit)
