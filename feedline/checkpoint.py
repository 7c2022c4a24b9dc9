"""Saves and restores a feed as an item of an Orbax checkpoint.

    Save               saves the state of a feed, beside the arrays of the model
    Restore            restores it, on any number of processes

Pass them to `orbax.checkpoint.args.Composite`. With the functions of Orbax's version 1, pass the feed
itself, which is a checkpointable. docs/training.md shows both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily

if TYPE_CHECKING:
    from feedline._src.checkpoint import Restore as Restore
    from feedline._src.checkpoint import Save as Save

__getattr__, __dir__, __all__ = lazily(
    __name__, {"Restore": "feedline._src.checkpoint", "Save": "feedline._src.checkpoint"}
)
