"""A feed as an item of a checkpoint of Orbax."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import orbax.checkpoint as ocp

from feedline._src.loader.lane_files import read_state, write_state


class _Handler(ocp.CheckpointHandler):
    """Writes and reads the folder of a feed; every process calls it, with a folder that all of them share."""

    def save(self, directory: Any, args: Save) -> None:
        write_state(directory, args.state)

    def restore(self, directory: Any, args: Restore) -> dict[str, Any]:
        state = read_state(directory)
        args.feed.set_state(state, **({"allow": args.allow} if args.allow else {}))
        return state


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """The present state of a feed, to be saved. The feed may continue at once.

    Rows with random access are saved by process 0, and lanes by the processes that read them.

    Args:
      feed: a `feedline.Feed`, or any object whose `get_state` gives JSON values.

    Raises:
      ProcessError: when it is saved, if another process saves other positions of the lanes.

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


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """Restores a feed to the state that `Save` saved, on any number of processes and devices.

    The restored item is that state.

    Args:
      feed: a `feedline.Feed`, or any object with `set_state`.
      allow: fields of the fingerprint that may differ, as in `feed.set_state`.

    Raises:
      ValueError: when it is restored, if the checkpoint is of other data, or lanes are missing.
      FileNotFoundError: the folder is not one of a feed.
    """

    feed: Any
    allow: Collection[str] = ()
