"""Watches the memory of a training loop: what devices and the host hold, and what grows with the steps."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import statistics
from typing import Any, Literal, NamedTuple, get_args

import jax

from feedline._src.errors import FeedError
from feedline._src.listen.statistics import check_feed
from feedline._src.options import checked_integer

OnGrowth = Literal["warn", "raise", "ignore"]
_log = logging.getLogger("feedline")
_SAMPLES = 10
"""The watch looks for growth at this many samples, and again at twice as many. Then it drops every second sample
and doubles the interval, so the next look comes when the steps since the warm-up have doubled."""
_MIN_CORRELATION = 0.9
"""A series grows if its correlation with the steps is at least this high; mere variation has a lower one."""
_NOISE = {"arrays": 0, "device": 1 << 20, "host": 16 << 20, "slabs": 0}
"""{what is watched: by how much it may grow without a leak}, since allocators keep freed memory."""
_HINTS = {
    "arrays": "Something refers to these arrays: a list, a closure, or a metric that is never fetched",
    "device": "Arrays of many shapes are kept, or arrays are kept only now and then",
    "slabs": "Something refers to the batches, or to slices of them",
    "host": "No jax.Array accounts for it: look for NumPy arrays, bytes or caches that the loop keeps",
}
"""Causes of growth by kind. The first kind that grows explains the growth of the kinds below it."""


def held(feed: Any = None) -> dict[str, int]:
    """What this process keeps in memory now, by name. Moves no data, and waits for nothing.

    "device 0": bytes in use on it; if the device does not count them, as on a CPU, the bytes of its live arrays
    (an array on several devices counts twice after its `addressable_shards` were used). "host": resident bytes;
    missing without /proc. "slabs": host buffers of the feed. "arrays float32[64, 8]": arrays with this dtype and
    global shape.
    """
    live = [array for array in jax.live_arrays() if not array.is_deleted()]
    on_device: collections.Counter[jax.Device] = collections.Counter()
    for array in live:
        shard = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            if array.sharding.memory_kind in (None, device.default_memory().kind):  # not in host memory
                on_device[device] += shard
    found = {
        f"device {i}": (device.memory_stats() or {}).get("bytes_in_use", on_device[device])
        for i, device in enumerate(jax.local_devices())
    }
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
        found["host"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if feed is not None:
        found["slabs"] = feed.statistics().slabs
    return found | collections.Counter(f"arrays {array.dtype}{list(array.shape)}" for array in live)


class Growth(NamedTuple):
    """Something that grows steadily with the steps.

    Attributes:
      what: "arrays float32[64, 8]", "device 0", "host" or "slabs".
      first, last: its size at the first and the last sample: a number of arrays or slabs, or bytes.
      steps: steps between these two samples.
    """

    what: str
    first: int
    last: int
    steps: int

    def __str__(self) -> str:
        """Example: arrays float32[]: 0 → 400 in 400 steps, 1 a step."""
        first, last = _shown(self.what, self.first), _shown(self.what, self.last)
        a_step = _shown(self.what, (self.last - self.first) / self.steps)
        return f"{self.what}: {first} → {last} in {self.steps:,} steps, {a_step} a step"


class MemoryWatch:
    """Samples memory every few steps, and warns if something grows.

    Call `after_step` at the end of each step, from the thread of the loop. A sample takes about 15 µs for each
    live array.

    Arrays of one dtype and shape are reported if each sample finds more of them than the one before. Memory is
    reported if it has grown since the warm-up by 1 MiB on a device, or 16 MiB on the host. Arrays in a list that
    is rarely emptied are reported, too, until the list is emptied for the first time after the warm-up.

    Args:
      feed: a feed whose host buffers are counted, too.
      every: steps from one sample to the next.
      warm_up: steps at the start, in which growth is normal: the loop compiles and prefetches.
      on_growth: "warn" logs a warning, "raise" raises a `FeedError`, "ignore" does neither: call `growths`.

    Raises:
      ValueError, TypeError: an argument is wrong.

    Example:
      >>> watch = MemoryWatch(every=1, warm_up=2, on_growth="ignore")
      >>> kept = []
      >>> for step in range(20):
      ...     kept.append(jax.numpy.zeros(77))  # a leak
      ...     watch.after_step()
      >>> [growth.what for growth in watch.growths()]
      ['arrays float32[77]']
    """

    def __init__(
        self, feed: Any = None, *, every: int = 20, warm_up: int = 40, on_growth: OnGrowth = "warn"
    ) -> None:
        if on_growth not in get_args(OnGrowth):
            raise ValueError(f"on_growth must be one of {', '.join(get_args(OnGrowth))}, got {on_growth!r}")
        if feed is not None:
            check_feed(feed)
        self._feed = feed
        self._every = checked_integer("every", every, at_least=1)
        self._warm_up = checked_integer("warm_up", warm_up, at_least=0)
        self._on_growth = on_growth
        self._step = 0
        self._samples: list[tuple[int, dict[str, int]]] = []  # (step, what was held), since the warm-up

    def after_step(self) -> None:
        """Count a step, and take a sample if one is due.

        Raises:
          FeedError: something grows, and `on_growth` is "raise".
        """
        self._step += 1
        since = self._step - self._warm_up
        if since < 0 or since % self._every:
            return
        self._samples.append((self._step, held(self._feed)))
        if len(self._samples) not in (_SAMPLES, 2 * _SAMPLES):
            return
        found = [] if self._on_growth == "ignore" else self.growths()
        if len(self._samples) > _SAMPLES:
            del self._samples[1::2]
            self._every *= 2
        if found:
            hint = next(hint for kind, hint in _HINTS.items() if any(g.what.startswith(kind) for g in found))
            message = f"memory grows with the steps: {'; '.join(map(str, found[:4]))}. {hint}"
            if self._on_growth == "raise":
                raise FeedError(message, stage="train")
            _log.warning("%s", message)

    def growths(self) -> list[Growth]:
        """What has grown steadily since the warm-up, the arrays first. Empty with fewer than ten samples."""
        if len(self._samples) < _SAMPLES:
            return []
        steps, found = [step for step, _ in self._samples], []
        for name in sorted({name for _, sample in self._samples for name in sample}):
            values = [sample.get(name, 0) for _, sample in self._samples]
            noise = _NOISE.get(name.partition(" ")[0], math.inf)
            # a leak adds at least one per sample, almost linearly; a series that goes up and down does not
            if values[-1] - values[0] >= max(noise, len(values) - 1) and (
                statistics.correlation(steps, values) >= _MIN_CORRELATION
            ):
                found.append(Growth(name, values[0], values[-1], steps[-1] - steps[0]))
        return found


def _shown(name: str, value: float) -> str:
    return f"{value / 2**20:,.2f} MiB" if name.startswith(("device", "host")) else f"{value:,g}"
