"""Where the lanes of an epoch end, as the processes agree on it: window by window. Pure, but for asking them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Gather(Protocol):
    """What each process has to say about a place in the run, put together. See `agreement.gather`."""

    def __call__(self, place: str, said: Any, failed: bool, stopped: Callable[[], bool]) -> list[Any]: ...


@dataclasses.dataclass(frozen=True)
class Told:
    """What one process, or all of them, say of a window.

    Attributes:
      ends: the lanes that have ended, with the number of their items.
      failed_at: items of each lane before the batch that could not be read; None: all could.
      why: what the others are told of that failure; see `errors.as_arguments`.
    """

    ends: dict[int, int]
    failed_at: int | None = None
    why: dict[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self) -> list[Any]:
        """As JSON values."""
        return [list(self.ends.items()), self.failed_at, self.why]

    @classmethod
    def joined(cls, all_said: list[Any]) -> Told:
        """What all processes said, each as `plain` values. Of failures the first one counts."""
        ends = {lane: items for said, _, _ in all_said for lane, items in said}
        failures = [(at, why) for _, at, why in all_said if at is not None]
        return cls(ends, *min(failures, key=lambda failure: failure[0], default=(None, {})))


@dataclasses.dataclass(frozen=True)
class Share:
    """What each lane gives to a batch.

    Attributes:
      lanes: how many there are.
      items: that each gives: rows / lanes.
      pads: whether shorter lanes are padded until the longest has ended; else the shortest ends an epoch.
    """

    lanes: int
    items: int
    pads: bool

    def exists(self, offset: int, ends: dict[int, int]) -> bool:
        """Whether there is a batch after `offset` items of each lane."""
        if self.pads:
            return len(ends) < self.lanes or offset < max(ends.values())
        return not ends or offset + self.items <= min(ends.values())

    def real(self, offset: int, ends: dict[int, int]) -> npt.NDArray[np.int64]:
        """int64[lanes]: how many items each lane gives to the batch after `offset` items."""
        counts = np.full(self.lanes, self.items, np.int64)
        for lane, items in ends.items():
            counts[lane] = min(max(items - offset, 0), self.items)
        return counts
