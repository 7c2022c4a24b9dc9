"""The numbers of threads, workers and batches with which a feed begins, and which of them it finds itself."""

from __future__ import annotations

from feedline._src.cluster.cores import own_cores
from feedline._src.feed_options import FeedOptions
from feedline._src.options import Reading, Settings

_LEAST_THREADS, _MOST_THREADS = 2, 16
"""By default. With one thread nothing would be read while a batch is placed."""


def tunable_settings(options: FeedOptions) -> frozenset[str]:
    """The fields of `Settings` that are found while the feed runs. None, if all is synchronous."""
    if not options.prefetch:
        return frozenset()
    given = {name: getattr(options.reading, name) for name in ("threads", "workers", "buffer")}
    return frozenset(name for name, value in {**given, "prefetch": options.prefetch}.items() if value == "auto")


def first_settings(options: FeedOptions) -> Settings:
    """The numbers to begin with; "auto" begins with the defaults. Beside workers no thread reads."""
    reading = options.reading
    prefetch = FeedOptions.prefetch if options.prefetch == "auto" else options.prefetch
    workers = 0 if reading.workers == "auto" else reading.workers
    threads = reading.threads
    if not prefetch or workers:
        threads = 0
    elif threads is None or threads == "auto":
        threads = default_threads()
    else:
        threads = max(1, threads)
    buffer = Reading.buffer if reading.buffer == "auto" else reading.buffer
    assert isinstance(buffer, int)
    assert isinstance(prefetch, int)
    return Settings(threads, workers, buffer, prefetch)


def default_threads() -> int:
    """The threads that read if `Reading.threads` is None."""
    return min(max(own_cores(), _LEAST_THREADS), _MOST_THREADS)
