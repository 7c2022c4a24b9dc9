"""`FeedOptions`: what a user asks a feed for. All defaults stand here, and all checks that need no source."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

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
from feedline._src.order.schedule import REMAINDERS, BatchSizes, Remainder
from feedline._src.placement.plan import as_shardings

if TYPE_CHECKING:
    from feedline._src.loader.form import Transform
    from feedline._src.plan.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class FeedOptions:
    """What a user asks a feed for: the arguments of `Feed`, where each is explained, with their defaults.

    `Feed(...)` makes one, `feed.options` returns it, and `Feed.from_options` takes one. It is checked when it is
    made; `dataclasses.replace` makes another one with some values changed. No source is opened, and no device is
    needed.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which change would work.

    Example:
      >>> import dataclasses, jax, numpy as np
      >>> from feedline import Feed, FeedOptions
      >>> options = FeedOptions({"x": np.zeros((64, 2))}, batch_size=8, sharding=jax.devices()[0], epochs=1)
      >>> options.remainder, options.prefetch
      ('drop', 2)
      >>> with Feed.from_options(dataclasses.replace(options, batch_size=16)) as feed:
      ...     len(feed), feed.options.batch_size
      (4, 16)
    """

    source: Any
    batch_size: int | BatchSizes
    sharding: Any
    _: dataclasses.KW_ONLY
    order: Order | None = None
    epochs: int | None = None
    remainder: Remainder = "drop"
    reading: Reading = Reading()  # noqa: RUF009  frozen
    transform: Transform | None = None
    prefetch: int | Auto = 2
    steps_per_call: int = 1
    with_place: bool = False

    def __post_init__(self) -> None:
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
        epochs = self.epochs
        checked = {
            "batch_size": _checked_sizes(self.batch_size),
            "sharding": as_shardings(self.sharding),
            "epochs": None if epochs is None else checked_integer("epochs", epochs, at_least=1, at_most=MAX_COUNT),
            "prefetch": checked_setting("prefetch", self.prefetch, at_least=0, at_most=MAX_AHEAD),
            "steps_per_call": checked_integer(
                "steps_per_call", self.steps_per_call, at_least=1, at_most=MAX_AHEAD
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def first_batch_size(self) -> int:
        """Rows of the first global batch."""
        return self.batch_size if isinstance(self.batch_size, int) else self.batch_size[0][1]

    @property
    def tunable(self) -> frozenset[str]:
        """The fields of `Settings` that are found while the feed runs. None, if all is synchronous."""
        if not self.prefetch:
            return frozenset()
        given = {name: getattr(self.reading, name) for name in ("threads", "workers", "buffer")}
        return frozenset(name for name, value in {**given, "prefetch": self.prefetch}.items() if value == "auto")

    def first_settings(self, default_threads: int) -> Settings:
        """The numbers to begin with; "auto" begins with the defaults. Beside workers no thread reads.

        Args:
          default_threads: those that read if `Reading.threads` is None or "auto".
        """
        prefetch = FeedOptions.prefetch if self.prefetch == "auto" else self.prefetch
        workers = 0 if self.reading.workers == "auto" else self.reading.workers
        threads = self.reading.threads
        if not prefetch or workers:
            threads = 0
        elif threads is None or threads == "auto":
            threads = default_threads
        else:
            threads = max(1, threads)
        buffer = Reading.buffer if self.reading.buffer == "auto" else self.reading.buffer
        assert isinstance(buffer, int)
        assert isinstance(prefetch, int)
        return Settings(threads, workers, buffer, prefetch)

    def plan(self, processes: int | None = None, process: int | None = None) -> Plan:
        """What a feed of these options will read and place on each process, and what that needs.

        No feed is built, no rows are read, and no process, thread or accelerator is needed: the sharding may be
        over a `jax.sharding.AbstractMesh`. The source is opened for its length and spec, and closed. Only records
        and streams have no spec: two elements of a Grain dataset are made, or the first item of a stream is read.
        A transform is called with a row of zeros.

        Args:
          processes: number of processes. They divide the devices of the sharding evenly, in the order of
            `jax.devices()`: the first devices belong to process 0. None: the processes that own the devices.
          process: only its part is computed. None: those of all processes.

        Raises:
          ValueError, TypeError, OSError: there is no such source, or no batch size at all fits the sharding; or
            `processes` do not divide the devices. Other reasons why a feed refuses the options are in
            `Plan.problems`.

        Example:
          >>> import jax, numpy as np
          >>> options = FeedOptions({"x": np.zeros((100, 3), np.float32)}, 32, jax.devices()[0], remainder="pad")
          >>> plan = options.plan()
          >>> plan.spec["x"].shape, plan.epoch.padded_steps, plan.epoch.padding, plan.problems
          ((32, 3), 4, 28, ())
        """
        from feedline._src.plan.plan import devices_by_process, plan_of
        from feedline._src.sources.open_source import opened_metadata

        metadata = opened_metadata(self.source)
        out = metadata.spec
        if self.transform is not None:
            from feedline._src.loader.form import transformed_spec

            row = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in out.leaves]
            try:
                out = transformed_spec(self.transform, out, row)
            except Exception as error:
                error.add_note(
                    "feedline: a plan calls the transform with a row of zeros, since it reads no rows, to learn "
                    "its shapes and dtypes"
                )
                raise
        return plan_of(metadata, out, self, devices_by_process(self.sharding, processes), process)


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
