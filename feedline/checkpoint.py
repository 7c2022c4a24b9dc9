"""A feed as an item of a checkpoint of Orbax.

    Save               saves where a feed stands, beside the arrays of the model
    Restore            restores it, on any number of processes

They are arguments of a `Composite` of `orbax.checkpoint`. For its functions of version 1 a feed
itself is a checkpointable. docs/training.md has both.
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
