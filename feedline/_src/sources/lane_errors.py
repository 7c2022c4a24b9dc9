"""The errors of lanes: their messages, and which StopIteration is an error and not the end of a lane."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import grain

from feedline._src.errors import FeedError

_TOO_LONG = "truncated to max length"
"""Part of the message of Grain's packing for a document that is longer than a packed row."""


def lane_error(lane: int, items: int, epoch: int, error: Exception) -> FeedError:
    """The error to raise if the next item of a lane cannot be read.

    Args:
      items: the number of items of this epoch that were read before.
    """
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):
        why = (
            "StopIteration, raised by a function of its dataset, which would pass for the end of the lane; give "
            "next() a default there, or catch it"
        )
    elif _TOO_LONG in str(error):
        why += (
            ". A document must fit into one packed row: cut or drop longer ones before they are packed, as in "
            '.map(lambda d: {"tokens": d["tokens"][:length]}); or split them by '
            "grain.experimental.ConcatThenSplitIterDataset"
        )
    return FeedError(f"lane {lane} failed after {items} items of epoch {epoch} with {why}", stage="read")


def raised_by_user_code(stop: StopIteration) -> bool:
    """Whether a function that Grain called (of a map, a filter, a source) raised it, so no iterator has ended.

    A StopIteration is the end of a stream if `__next__` of an iterator raises it, Grain's or the user's own. It is
    an error if another function raises it that Grain calls. Some of Grain's iterators catch it and raise their
    own later; then it is the cause, or leaves no trace.
    """
    link: BaseException | None = stop
    while link is not None:
        if _left_grain([frame for frame, _ in traceback.walk_tb(link.__traceback__)]):
            return True
        link = link.__cause__
    return False


def _left_grain(frames: Sequence[FrameType]) -> bool:
    """Whether these frames are inside a function that Grain called, other than an iterator's `__next__`."""
    ours = [frame for frame in frames if _package(frame) not in sys.stdlib_module_names]  # thread pools
    called = False
    for in_grain, group in itertools.groupby(ours, lambda frame: _package(frame) == "grain"):
        if called and not in_grain and not _is_next(list(group)):
            return True
        called = called or in_grain
    return False


def _is_next(frames: Sequence[FrameType]) -> bool:
    """Whether these frames are an iterator's `__next__`, perhaps decorated, and the functions that it calls."""
    names = [frame.f_code.co_name.rpartition(".")[2] for frame in frames]  # Cython's are qualified
    return names[0] == "__next__" or any(
        name == "__next__" and isinstance(frame.f_locals.get("self"), grain.DatasetIterator)
        for name, frame in zip(names, frames, strict=True)
    )


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
