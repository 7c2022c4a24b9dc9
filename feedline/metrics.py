"""The counters and times of feeds, for Prometheus and for your own logs.

::

    serve          serves the metrics of feeds at http://host:port/metrics, until you close the returned server
    FeedCollector  the same metrics, for your own prometheus_client registry
    scalars        the metrics of one feed as {name: number}

The first two need `pip install '.[prometheus]'` in the clone of the repository.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily

if TYPE_CHECKING:
    from feedline._src.listen.prometheus import FeedCollector as FeedCollector
    from feedline._src.listen.prometheus import serve as serve
    from feedline._src.listen.statistics import scalars as scalars

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "FeedCollector": "feedline._src.listen.prometheus",
        "scalars": "feedline._src.listen.statistics",
        "serve": "feedline._src.listen.prometheus",
    },
)
