"""Saves and restores a feed as an item of an Orbax checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import orbax.checkpoint as ocp

from feedline._src.loader.lane_files import read_state, write_state


class Handler(ocp.CheckpointHandler):
    """Writes and reads the folder of a feed. Every process calls it, with a folder that all of them share."""

    def save(self, directory: Any, args: Save) -> None:
        write_state(directory, args.state)

    def restore(self, directory: Any, args: Restore) -> dict[str, Any]:
        state = read_state(directory)
        args.feed.set_state(state, **({"allow": args.allow} if args.allow else {}))
        return state


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """Saves the present state of a feed. The feed may continue at once.

    With random access, process 0 saves the state. For a stream, processes that read lanes save the lanes' states.
    If processes save lanes at different positions, restoring the checkpoint raises an error.

    Attributes:
      feed: a `feedline.Feed`, or any object whose `get_state` returns JSON values.

    Example:
      >>> import tempfile, numpy as np, jax, feedline, orbax.checkpoint as ocp
      >>> from pathlib import Path
      >>> feed = feedline.Feed({"x": np.arange(64)}, 8, jax.devices()[0])
      >>> first = next(feed)
      >>> with ocp.CheckpointManager(Path(tempfile.mkdtemp())) as manager:
      ...     saved = manager.save(1, args=ocp.args.Composite(feed=Save(feed)))
      ...     second = next(feed)
      ...     found = manager.restore(1, args=ocp.args.Composite(feed=Restore(feed)))
      >>> found.feed["step"], np.array_equal(next(feed)["x"], second["x"])
      (1, True)
    """

    feed: Any

    def __post_init__(self) -> None:
        self.state = self.feed.get_state()


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """Restores a feed to the state that `Save` saved, on any number of processes and devices.

    Orbax returns this state as the restored item. `Save` has an example of both classes.

    Attributes:
      feed: a `feedline.Feed`, or any object with `set_state`.
      allow: fields of the fingerprint that may differ, as in `feed.set_state`.

    Raises:
      ValueError: on restoring, if the checkpoint was saved with other data, or if lanes are missing or were saved
        at different positions.
      FileNotFoundError: the folder holds no state of a feed.
    """

    feed: Any
    allow: Collection[str] = ()
