"""`FeedOptions`, all arguments of a feed, and `building`, the context in which tools change them."""

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
    """The arguments of `Feed` as one value, with their defaults. `Feed` explains each.

    `feed.options` returns the options of a feed, and `Feed.from_options` builds a feed from options. Options are
    validated on construction, which opens no source and needs no device. `dataclasses.replace` copies them with
    some values changed.

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
        """Compute what a feed of these options will read and place on each process, and the memory it needs.

        This builds no feed, and needs no other process, thread or accelerator: the sharding may be over a
        `jax.sharding.AbstractMesh`. The source is opened for its length and spec, and closed. No rows are read,
        except the first record or item of records and streams, which have no spec. A transform is called with a
        row of zeros.

        Args:
          processes: number of processes. They divide the devices of the sharding evenly, in the order of
            `jax.devices()`: the first devices belong to process 0. None: the processes that own the devices.
          process: index of the only process for which to compute. None: all processes.

        Raises:
          ValueError, TypeError, OSError: there is no such source, no batch size at all fits the sharding, or
            `processes` does not divide the number of devices. `Plan.problems` lists all other reasons for which a
            feed refuses the options.

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
                    "feedline: a plan calls the transform with a row of zeros, to learn the shapes and dtypes of "
                    "the result"
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
    """Context manager: `change` may change the options of every feed that this process builds, on any thread.

    So a tool can inspect the feeds of a program, or build them with other options, without changing the program.
    Contexts may be nested; the `change` of the outer one is called first.

    Args:
      change: the options given to a feed → the options to build it with. `Feed(...)` raises errors of `change`.
      asked: called with the feed, before each `next` of a feed built in this context, on the same thread.

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
    """These options, as changed by the contexts that are open now."""
    for hooks in tuple(_entered):
        if hooks.change is not None:
            options = hooks.change(options)
    return options


def asked_hooks() -> tuple[Callable[[Any], None], ...]:
    """The functions `asked` of the contexts that are open now."""
    return tuple(hooks.asked for hooks in _entered if hooks.asked is not None)
