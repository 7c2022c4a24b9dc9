"""`FeedOptions`, what a user asks a feed for, and `building`, the context in which tools change it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from feedline._src.plan.asked import CheckedOptions

if TYPE_CHECKING:
    from feedline._src.plan.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class FeedOptions(CheckedOptions):
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
        from feedline._src.sources.as_source import opened_metadata

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


class _Hooks(NamedTuple):
    change: Callable[[FeedOptions], FeedOptions] | None
    asked: Callable[[Any], None] | None


_entered: list[_Hooks] = []


@contextlib.contextmanager
def building(
    change: Callable[[FeedOptions], FeedOptions] | None = None, *, asked: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """A context in which every feed that this process builds, in any thread, goes through `change`.

    A tool can so inspect the feeds of a program, or build them with other options, without changing the program.
    Contexts may be nested; the outer one is applied first.

    Args:
      change: what a feed was asked for → what is built. An exception of it is raised by `Feed(...)`.
      asked: called with a feed that was built in this context, before it gives a batch, on the thread that asks.

    Example:
      >>> import dataclasses, jax, numpy as np
      >>> from feedline import Feed, building
      >>> with building(lambda options: dataclasses.replace(options, prefetch=0)):
      ...     feed = Feed({"x": np.zeros((64, 2))}, 8, jax.devices()[0])
      >>> feed.prefetch
      0
      >>> feed.close()
    """
    hooks = _Hooks(change, asked)
    _entered.append(hooks)
    try:
        yield
    finally:
        _entered.remove(hooks)


def changed(options: FeedOptions) -> FeedOptions:
    """These options as the contexts that are entered now change them."""
    for hooks in tuple(_entered):
        if hooks.change is not None:
            options = hooks.change(options)
    return options


def asked_hooks() -> tuple[Callable[[Any], None], ...]:
    """What the contexts that are entered now want to be called with."""
    return tuple(hooks.asked for hooks in _entered if hooks.asked is not None)
