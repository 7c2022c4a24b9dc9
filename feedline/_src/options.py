"""The option classes of a feed: frozen dataclasses that are validated on construction."""

from __future__ import annotations

import dataclasses
import numbers
import operator
import os
from typing import Literal, NamedTuple, get_args

BadRows = Literal["raise", "substitute", "mask"]
Auto = Literal["auto"]
"""Instead of a number: the feed tunes the setting while it runs."""
_SEED_BITS = 64
MAX_AHEAD = 1 << 16
"""The limit of `Reading.buffer` and `prefetch`, in batches: more would only exhaust memory."""
MAX_THREADS = 1 << 12
"""The limit of reading threads and of worker processes."""
DEFAULT_MAX_THREADS = 16
"""Maximum reading threads that a feed starts by default, and that a report advises."""
MAX_COUNT = (1 << 31) - 1
"""The limit of the rows in a batch, and of the epochs of a pass."""
_MAX_SECONDS = 1e9  # 30 years: well below the longest wait that the operating system accepts


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A shuffle that reads neighbouring rows at about the same time, for storage where random reads are slow.

    In each epoch, blocks of adjacent rows are shuffled, and then the rows inside each window of `window` blocks.
    So the rows of a batch come from `window` blocks. If neighbouring rows are alike, as in files sorted by label,
    such an order is far less random than a shuffle of all rows; shuffle such files once when you write them.

    No row is read from storage twice if the page cache holds one window: rows · window · (bytes of a row).

    Attributes:
      rows: adjacent rows in a block; the last block may have fewer. Choose what storage reads in one piece: the
        rows of a row group or a chunk; in a plain file, what the kernel reads ahead at once (often 128 KiB, but
        8 MiB on some machines: `cat /sys/block/*/queue/read_ahead_kb`).
      window: blocks in a window; choose as many as memory allows. 1 shuffles blocks, and the rows in each block.

    Example:
      >>> Order(seed=7, shuffle=Blocks(rows=256, window=64))
      Order(seed=7, shuffle=Blocks(rows=256, window=64))
    """

    rows: int
    window: int

    def __post_init__(self) -> None:
        for name in ("rows", "window"):
            object.__setattr__(self, name, checked_integer(f"Blocks.{name}", getattr(self, name), at_least=1))


@dataclasses.dataclass(frozen=True)
class Order:
    """Which row stands at which position of an epoch: a pure function of (seed, epoch, position).

    Attributes:
      seed: 0 ≤ seed < 2^64. Different seeds and epochs give different orders.
      shuffle: True permutes all rows; `Blocks` keeps rows near their neighbours, for storage where random reads
        are slow; False keeps the source's order.

    Example:
      >>> Order(seed=7)
      Order(seed=7, shuffle=True)
    """

    seed: int = 0
    shuffle: bool | Blocks = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_integer("Order.seed", self.seed, at_least=0))
        if self.seed >= 1 << _SEED_BITS:
            raise ValueError(f"Order.seed must be below 2^{_SEED_BITS}, got {self.seed}; use fewer bits")
        if not isinstance(self.shuffle, bool | Blocks):
            raise TypeError(f"Order.shuffle must be True, False or feedline.Blocks, got {self.shuffle!r}")


class Settings(NamedTuple):
    """The numbers of threads, workers and batches with which a feed works. None of them changes a batch.

    Attributes:
      threads, workers, buffer, prefetch: as in `Reading` and `Feed`.
    """

    threads: int
    workers: int
    buffer: int
    prefetch: int

    @property
    def host_batches(self) -> int:
        """Process-local batches in host memory: those that are read ahead, and the one being placed."""
        return self.buffer + 1

    @property
    def host_batches_on_cpu_devices(self) -> int:
        """Process-local batches in host memory if the devices are CPUs: `host_batches`, and the placed
        batches, of which `prefetch` wait and two are in use.
        """
        return self.host_batches + self.prefetch + 2

    @property
    def device_batches(self) -> int:
        """Batches on a device: `prefetch` that wait, one being placed, one in use."""
        return self.prefetch + 2

    def ahead(self, stream: bool) -> int:
        """Maximum number of batches by which reading is ahead of the loop.

        `stream`: the source is a stream. One thread reads its batches, `buffer` at a time, and places them.
        """
        if not self.prefetch:
            return 0
        in_workers = self.workers and self.workers * (max(1, self.buffer // self.workers) + 1)
        return self.prefetch + (self.buffer if stream else 1 + (in_workers or self.buffer))

    @property
    def shared_batches(self) -> int:
        """Maximum process-local batches in flight from workers."""
        return self.workers and self.workers * (2 * max(1, self.buffer // self.workers) + 3)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The memory and the cores of this process that "auto" settings may use.

    Attributes:
      host_bytes: host memory for batches that are read ahead. None: a quarter of the memory of the machine, or of
        its control group if that is less, divided by the number of the run's processes on this host.
      device_bytes: memory of each device for batches. None: a tenth of the device's memory, if JAX reports it.
      cores: how many cores the reading threads or the workers may keep busy. None: the cores that this process may
        use, divided by the processes that share them.

    Example:
      >>> Reading(threads="auto", buffer="auto", limits=Limits(host_bytes=2 << 30, cores=4)).limits.cores
      4
    """

    host_bytes: int | None = None
    device_bytes: int | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "device_bytes", "cores"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checked_integer(f"Limits.{name}", value, at_least=1))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How rows are read on the host.

    `threads`, `workers` and `buffer` may be "auto": the feed tunes them while it runs, within `limits`, as
    docs/feed.md describes under "Automatic settings". Batches stay the same.

    Attributes:
      threads: how many threads read rows with random access, and place batches; 0 is the same as 1. None: the
        cores that this process may use, divided by the processes that share them, at least 2 and at most 16.
        Batches of streams, and batches that workers read, are placed by one thread.
      workers: worker processes, for Python transforms that hold the GIL. 0: none. Each takes seconds to start, and
        opens the source's files again. Up to workers · (2 · max(1, buffer // workers) + 3) process-local batches
        are in flight, in host memory.
      buffer: how many host batches may be read ahead.
        Host bytes = (buffer + 1) × process-local batch.
      bad_rows: what to do with a bad row: one that cannot be read, whose shapes or dtypes differ from the first
        row's, or that holds a number which does not fit JAX's dtype. "raise": raise a `RowError` with the row, its
        file, epoch and position. "substitute": replace it by another row, which is chosen by seed, epoch and
        position; a stream uses its first item. "mask": replace it, too, and set the boolean leaf `valid` to False
        for that row. The leaf is added whatever `remainder` is; the batch must be a dict without a key `valid`.
        All other rows keep their positions.
      bad_rows_budget: how many bad rows may be replaced before `next` raises a `RowError`: an integer is a count,
        a fraction is a share of the delivered rows, rounded up. Both count only rows that this process supplied
        since the feed was built. A row counts once, however often it is delivered.
      quarantine: a file to which each replaced row is appended once, as a line of JSON, when its batch is
        delivered; None: no file is written.
      restart: how many worker processes the feed replaces before it raises a `WorkerError`: processes that ended,
        and processes that the feed killed because no batch came for `stall_error_s`. Batches stay the same. Each
        time, all workers are started again, which takes seconds.
      stall_warning_s: warn, with the stacks of all threads, once the consumer has waited this long while no stage
        advanced, or once building the feed takes this long.
      stall_error_s: raise a `StallError` after this long. With `prefetch=0`, none is raised, since the thread that
        would raise it hangs. `stall_warning_s` and `stall_error_s` are at most 1e9 seconds, in effect never.
      check_replicas_every: with several processes, compare checksums between processes that own the same rows,
        once in this many batches; 0: never. Checksums are computed before the batch is placed, at about 1 GB/s.
      limits: what "auto" settings may use; refused if no setting is "auto".

    Example:
      >>> Reading(threads=8, bad_rows="mask", bad_rows_budget=0.01).buffer
      2
    """

    threads: int | Auto | None = None
    workers: int | Auto = 0
    buffer: int | Auto = 2
    bad_rows: BadRows = "raise"
    bad_rows_budget: int | float = 0.001
    quarantine: str | os.PathLike[str] | None = None
    restart: int = 0
    stall_warning_s: float = 30.0
    stall_error_s: float = 300.0
    check_replicas_every: int = 0
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.threads is not None:
            threads = checked_setting("Reading.threads", self.threads, at_least=0, at_most=MAX_THREADS)
            object.__setattr__(self, "threads", threads)
        workers = checked_setting("Reading.workers", self.workers, at_least=0, at_most=MAX_THREADS)
        object.__setattr__(self, "workers", workers)
        buffer = checked_setting("Reading.buffer", self.buffer, at_least=1, at_most=MAX_AHEAD)
        object.__setattr__(self, "buffer", buffer)
        if not isinstance(self.limits, Limits):
            raise TypeError(f"Reading.limits must be a feedline.Limits, got {self.limits!r}")
        if self.bad_rows not in get_args(BadRows):
            raise ValueError(f"Reading.bad_rows must be one of {get_args(BadRows)}, got {self.bad_rows!r}")
        object.__setattr__(self, "bad_rows_budget", _checked_budget(self.bad_rows_budget))
        if self.quarantine is not None:
            if not isinstance(self.quarantine, str | os.PathLike):
                raise TypeError(f"Reading.quarantine must be the path of a file, got {self.quarantine!r}")
            if self.bad_rows == "raise":
                raise ValueError(
                    'Reading.quarantine lists rows that were replaced, and bad_rows="raise" replaces none; leave '
                    'quarantine out, or use bad_rows="substitute" or "mask"'
                )
            object.__setattr__(
                self, "quarantine", os.path.abspath(self.quarantine)
            )  # the program may change its current directory
        object.__setattr__(self, "restart", checked_integer("Reading.restart", self.restart, at_least=0))
        every = checked_integer("Reading.check_replicas_every", self.check_replicas_every, at_least=0)
        object.__setattr__(self, "check_replicas_every", every)
        for name in ("stall_warning_s", "stall_error_s"):
            object.__setattr__(self, name, checked_seconds(f"Reading.{name}", getattr(self, name)))


def checked_integer(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    """Validate an integer (NumPy's included; no bools or floats) within bounds, and return it as an int."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    if at_most is not None and number > at_most:
        raise ValueError(f"{name} must be at most {at_most}, got {number}")
    return number


def checked_setting(name: str, value: object, *, at_least: int, at_most: int) -> int | Auto:
    """Validate an integer within bounds, or "auto"."""
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        raise TypeError(f'{name} must be an integer, or "auto", got {value!r}')
    return checked_integer(name, value, at_least=at_least, at_most=at_most)


def _checked_budget(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Reading.bad_rows_budget must be a count or a share of the rows, got {value!r}")
    if isinstance(value, numbers.Integral):
        return checked_integer("Reading.bad_rows_budget", value, at_least=0)
    share = float(value)
    if not 0 <= share < 1:
        raise ValueError(
            f"Reading.bad_rows_budget must be an integer, or a share of at least 0 and below 1, got {share:g}"
        )
    return share


def checked_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    seconds = float(value)
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"{name} must be above 0 and at most {_MAX_SECONDS:g} seconds, got {seconds:g}")
    return seconds
