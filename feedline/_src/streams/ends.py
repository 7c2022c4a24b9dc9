"""Agreement of the processes on where the lanes of an epoch end, window by window. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class GatherReports(Protocol):
    """Returns what all processes said of a window, equal values once, on each. See `agreement.all_gather`."""

    def __call__(self, name: str, value: Any, failed: bool, stopped: Callable[[], bool], /) -> list[Any]: ...


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """What one process reports of a window, or all processes together.

    Attributes:
      ends: the number of items of each lane that has ended.
      failed_at: items of each lane before the batch that could not be read; None: no batch failed.
      why: describes that failure to the other processes; see `errors.as_arguments`.
    """

    ends: dict[int, int]
    failed_at: int | None = None
    why: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> list[Any]:
        """The report as JSON values."""
        return [list(self.ends.items()), self.failed_at, self.why]

    @classmethod
    def merged(cls, reports: list[Any]) -> WindowReport:
        """One report from those of all processes, as JSON values. It has the earliest of their failures."""
        ends = {lane: items for lane_ends, _, _ in reports for lane, items in lane_ends}
        failures = [(at, why) for _, at, why in reports if at is not None]
        return cls(ends, *min(failures, key=lambda failure: failure[0], default=(None, {})))


@dataclasses.dataclass(frozen=True)
class Share:
    """How many items each lane gives to a batch.

    Attributes:
      lanes: the number of lanes.
      items: the items of each lane in a batch: rows / lanes.
      pads: whether shorter lanes are padded until the longest has ended; else an epoch ends with the shortest.
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
