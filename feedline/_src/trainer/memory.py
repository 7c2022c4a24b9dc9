"""Watches the memory of a training loop: what devices and the host hold, and what of it grows with the steps."""

from __future__ import annotations

import collections
import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer

OnGrowth = Literal["warn", "raise", "ignore"]
_log = logging.getLogger("feedline")
_FEW_SAMPLES = 10
"""The fewest samples that tell growth from chance. It is looked for then, and at each doubling of the steps."""
_MANY_SAMPLES = 128
"""At this number every second sample is dropped, and the next ones are taken half as often."""
_STEADY = 0.9
"""The least correlation of a series with the steps. What only varies has less."""
_HOST_NOISE, _DEVICE_NOISE = 16 << 20, 1 << 20
"""Bytes that may come and go in a sound loop: allocators keep freed memory."""


class Snapshot(NamedTuple):
    """What this process holds after some step.

    Attributes:
      step: steps done.
      host_bytes: resident memory of the process.
      device_bytes: of each local device, the bytes in use where the device counts them; else those of live arrays,
        with an array and a view of its shard counted twice.
      peak_bytes: of each local device, the most it ever held; None where it does not say, as on a CPU.
      arrays: live arrays by dtype and shape of the global array, for example {"float32[64, 8]": 3}.
      slabs: host buffers of the feed; None without a feed.
    """

    step: int
    host_bytes: int
    device_bytes: tuple[int, ...]
    peak_bytes: tuple[int | None, ...]
    arrays: Mapping[str, int]
    slabs: int | None


def snapshot(step: int = 0, feed: Any = None) -> Snapshot:
    """What this process holds now. It moves no data, and waits for nothing.

    Example:
      >>> x = jax.numpy.zeros((1234, 8))
      >>> snapshot().arrays["float32[1234, 8]"]
      1
    """
    devices = jax.local_devices()
    here = dict.fromkeys(devices, 0)
    counts: collections.Counter[str] = collections.Counter()
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        counts[f"{array.dtype}{list(array.shape)}"] += 1
        shard = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            if array.sharding.memory_kind in (None, device.default_memory().kind):  # else it lies in host memory
                here[device] = here.get(device, 0) + shard
    told = [device.memory_stats() or {} for device in devices]
    return Snapshot(
        step,
        _resident(),
        tuple(stats.get("bytes_in_use", here[device]) for device, stats in zip(devices, told, strict=True)),
        tuple(stats.get("peak_bytes_in_use") for stats in told),
        counts,
        None if feed is None else feed.statistics().slabs,
    )


class Growth(NamedTuple):
    """Something that grows steadily with the steps.

    Attributes:
      what: "arrays float32[64, 8]", "device 0", "host" or "slabs".
      first, last: its size at the first and the last step that were looked at: arrays, slabs or bytes.
      steps: between these two.
    """

    what: str
    first: int
    last: int
    steps: int

    def __str__(self) -> str:
        """Example: arrays float32[]: 0 → 400 in 400 steps, 1 a step."""
        counted = self.what.startswith(("arrays", "slabs"))
        first, last = (f"{value:,}" if counted else _size(value) for value in (self.first, self.last))
        rate = (self.last - self.first) / self.steps
        a_step = f"{rate:.3g}" if counted else _size(rate)
        return f"{self.what}: {first} → {last} in {self.steps:,} steps, {a_step} a step"


class MemoryWatch:
    """Takes a snapshot every few steps, and warns of what grows.

    Call `after_step` at the end of each step, from the thread of the loop. A snapshot takes some 15 µs for each
    live array.

    It sees arrays of one dtype and shape of which some are kept from each snapshot to the next, devices that hold
    1 MiB more, and a host that holds 16 MiB more than after the warm-up. A list that is emptied only rarely
    is reported until it has been emptied once.

    Args:
      feed: whose host buffers are counted, too.
      every: steps from one snapshot to the next.
      warm_up: steps before which growth is normal: compiling, prefetching.
      on_growth: "warn" logs a warning, "raise" raises a `FeedError`, "ignore" leaves it to `growths` and `report`.

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
        self,
        feed: Any = None,
        *,
        every: int = 20,
        warm_up: int = 40,
        on_growth: OnGrowth = "warn",
    ) -> None:
        if on_growth not in get_args(OnGrowth):
            raise ValueError(f"on_growth must be one of {', '.join(get_args(OnGrowth))}, got {on_growth!r}")
        self._feed = feed
        self._every = checked_integer("every", every, at_least=1)
        self._warm_up = checked_integer("warm_up", warm_up, at_least=0)
        self._on_growth = on_growth
        self._step = 0
        self._start = snapshot(0, feed)
        self._samples: list[Snapshot] = []  # after the warm-up
        self._look_after = (_FEW_SAMPLES - 1) * self._every  # steps after the warm-up: growth is looked for next

    def after_step(self) -> None:
        """Count a step; at every few of them take a snapshot.

        Raises:
          FeedError: with `on_growth="raise"`, something grows.
        """
        self._step += 1
        if self._step < self._warm_up or (self._step - self._warm_up) % self._every:
            return
        self._samples.append(snapshot(self._step, self._feed))
        if len(self._samples) == _MANY_SAMPLES:
            del self._samples[1::2]
            self._every *= 2
        if self._step - self._warm_up < self._look_after:
            return
        self._look_after *= 2
        if self._on_growth == "ignore" or not (found := self.growths()):
            return
        message = self._explained(found)
        if self._on_growth == "raise":
            raise FeedError(message, stage="train")
        _log.warning("%s", message)

    def growths(self) -> list[Growth]:
        """What has grown steadily since the warm-up, the arrays first. Empty with fewer than ten snapshots."""
        if len(self._samples) < _FEW_SAMPLES:
            return []
        series: dict[str, tuple[list[int], int]] = {}
        for kind in sorted({kind for sample in self._samples for kind in sample.arrays}):
            series[f"arrays {kind}"] = [sample.arrays.get(kind, 0) for sample in self._samples], 0
        for i in range(len(self._start.device_bytes)):
            series[f"device {i}"] = [sample.device_bytes[i] for sample in self._samples], _DEVICE_NOISE
        series["host"] = [sample.host_bytes for sample in self._samples], _HOST_NOISE
        series["slabs"] = [sample.slabs or 0 for sample in self._samples], 0
        return [growth for what, of in series.items() if (growth := self._grown(what, *of))]

    def report(self) -> str:
        """A table: what was held at the start, after the warm-up and now; and below it what grows."""
        columns = [("start", self._start)]
        if self._samples:
            columns.append((f"step {self._samples[0].step:,}", self._samples[0]))
        columns.append((f"step {self._step:,}", snapshot(self._step, self._feed)))
        rows = [["", *(name for name, _ in columns)]]
        shots = [shot for _, shot in columns]
        for i, device in enumerate(jax.local_devices()):
            rows.append([f"{device.platform} {i}, live", *(_size(shot.device_bytes[i]) for shot in shots)])
            if shots[-1].peak_bytes[i] is not None:
                rows.append([f"{device.platform} {i}, peak", *(_size(shot.peak_bytes[i] or 0) for shot in shots)])
        rows.append(["host, resident", *(_size(shot.host_bytes) for shot in shots)])
        rows.append(["live arrays", *(f"{sum(shot.arrays.values()):,}" for shot in shots)])
        if shots[-1].slabs is not None:
            rows.append(["host buffers", *(f"{shot.slabs:,}" for shot in shots)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, *map(str, self.growths())])

    def _explained(self, found: Sequence[Growth]) -> str:
        listed = "; ".join(map(str, found[:4])) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        grown = {growth.what.split()[0] for growth in found}
        if "arrays" in grown:
            hint = "Something refers to these arrays: a list, a closure, or a metric that is never fetched"
        elif "device" in grown:
            hint = "Arrays are kept that have many shapes, or are kept only now and then"
        elif "slabs" in grown:
            hint = "Something refers to the batches, or to slices of them"
        else:
            hint = "No array accounts for it: look for NumPy arrays, bytes or caches that the loop keeps"
        return f"memory grows with the steps: {listed}. {hint}"

    def _grown(self, what: str, values: Sequence[int], noise: int) -> Growth | None:
        steps = [sample.step for sample in self._samples]
        # a leak adds one or more at each snapshot, along a line; what only goes up and down does not
        if values[-1] - values[0] < max(noise, len(values) - 1) or statistics.correlation(steps, values) < _STEADY:
            return None
        return Growth(what, values[0], values[-1], steps[-1] - steps[0])


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say (it is Linux that does)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _size(count: float) -> str:
    """Example: 3.2 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.{0 if count >= 100 * size else 3}{'f' if count >= 100 * size else 'g'}} {unit}"
    return f"{count:.0f} B"
