"""What a user asks a feed for, checked as far as it can be without looking at the source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from feedline._src.cluster.cores import own_cores
from feedline._src.loader.form import Transform
from feedline._src.options import (
    MAX_AHEAD,
    MAX_COUNT,
    Auto,
    Limits,
    Order,
    Reading,
    Settings,
    checked_integer,
    checked_setting,
)
from feedline._src.order.schedule import REMAINDERS, Remainder

_LEAST_THREADS, _MOST_THREADS = 2, 16
"""By default. With one thread nothing would be read while a batch is placed."""
_START_BUFFER, _START_PREFETCH = 2, 2
"""What "auto" begins with: the defaults."""


BatchSizes = Sequence[tuple[int, int]]
"""(first step, batch size), by ascending steps, the first one 0."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks a feed for. See `Feed` for each."""

    source: Any
    batch_sizes: int | BatchSizes
    sharding: Any
    order: Order | None
    epochs: int | None
    remainder: Remainder
    reading: Reading
    transform: Transform | None
    prefetch: int | Auto
    steps_per_call: int = 1
    with_place: bool = False

    def checked(self) -> Request:
        """The same, with plain integers.

        Raises:
          ValueError, TypeError: an argument is wrong.
        """
        if self.remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {REMAINDERS}, got {self.remainder!r}")
        if self.order is not None and not isinstance(self.order, Order):
            raise TypeError(f"order must be a feedline.Order or None, got {self.order!r}")
        if not isinstance(self.reading, Reading):
            raise TypeError(f"reading must be a feedline.Reading, got {self.reading!r}")
        given = (self.reading.threads, self.reading.workers, self.reading.buffer, self.prefetch)
        if self.reading.limits != Limits() and "auto" not in given:
            raise ValueError(
                'Reading.limits holds for settings that are "auto", and none is; leave it out, or use '
                'threads="auto", workers="auto", buffer="auto" or prefetch="auto"'
            )
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be a function (batch, rows) -> batch, got {self.transform!r}")
        if not isinstance(self.with_place, bool):
            raise TypeError(f"with_place must be True or False, got {self.with_place!r}")
        return dataclasses.replace(
            self,
            batch_sizes=_checked_sizes(self.batch_sizes),
            epochs=None
            if self.epochs is None
            else checked_integer("epochs", self.epochs, at_least=1, at_most=MAX_COUNT),
            prefetch=checked_setting("prefetch", self.prefetch, at_least=0, at_most=MAX_AHEAD),
            steps_per_call=checked_integer("steps_per_call", self.steps_per_call, at_least=1, at_most=MAX_AHEAD),
        )

    @property
    def batch_size(self) -> int:
        """The first one."""
        return self.batch_sizes if isinstance(self.batch_sizes, int) else self.batch_sizes[0][1]

    @property
    def tunable(self) -> frozenset[str]:
        """The fields of `Settings` that are found while the feed runs. None, if all is synchronous."""
        if not self.prefetch:
            return frozenset()
        given = {name: getattr(self.reading, name) for name in ("threads", "workers", "buffer")}
        return frozenset(name for name, value in {**given, "prefetch": self.prefetch}.items() if value == "auto")

    def settings(self) -> Settings:
        """The numbers to begin with. No threads read where workers do, or all is synchronous."""
        reading = self.reading
        prefetch = _START_PREFETCH if self.prefetch == "auto" else self.prefetch
        workers = 0 if reading.workers == "auto" else reading.workers
        threads = reading.threads
        if not prefetch or workers:
            threads = 0
        elif threads is None or threads == "auto":
            threads = default_threads()
        else:
            threads = max(1, threads)
        return Settings(threads, workers, _START_BUFFER if reading.buffer == "auto" else reading.buffer, prefetch)


def _checked_sizes(given: Any) -> int | BatchSizes:
    if not isinstance(given, list | tuple):
        return checked_integer("batch_size", given, at_least=1, at_most=MAX_COUNT)
    if not given or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given):
        raise TypeError(
            "batch_size must be an integer, or (first step, batch size) pairs as in [(0, 256), (1000, 512)], got "
            f"{given!r}"
        )
    steps = [checked_integer("batch_size: the first step of a size", step, at_least=0) for step, _ in given]
    if steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(
            f"batch_size: sizes must begin at ascending steps, the first at 0, got {steps}; sort them"
        )
    sizes = [checked_integer("batch_size", size, at_least=1, at_most=MAX_COUNT) for _, size in given]
    return tuple(zip(steps, sizes, strict=True))


def default_threads() -> int:
    """The threads that read if `Reading.threads` is None."""
    return min(max(own_cores(), _LEAST_THREADS), _MOST_THREADS)
