"""What does it cost to restore a state, at position 0 and at large positions?

This is feedline's own time, since the source computes its rows. Refuted by more than 10 ms, or by a cost that
grows with the position.

    python benchmarks/claims/resume.py --out resume.json
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.script import parser, save

from feedline._src.feed import Feed

_ROWS = 10**15
_POSITIONS = (0, 10**6, 10**12)
_BATCH = 1024


class _VastSource:
    """A `RowSource` of 10^15 computed rows: row i is i mod 2^31."""

    def __init__(self) -> None:
        self.spec = jax.ShapeDtypeStruct((), np.int32)
        self.identity = {"kind": "vast"}

    def __len__(self) -> int:
        return _ROWS

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        out[...] = rows % (1 << 31)

    def close(self) -> None:
        """Nothing to close."""


def resume(repeats: int) -> list[dict[str, Any]]:
    """Restore a feed of 10^15 rows at several positions, and take the first batch after each.

    Returns:
      for each position {"position", "restore_s": the median time of `set_state`, "first_batch_s": the median time
      until the first batch is on the mesh, "samples": pairs of both}.
    """
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    found = []
    with Feed(_VastSource(), _BATCH, sharding) as feed:
        state = feed.get_state()
        for position in _POSITIONS:
            samples = []
            for _ in range(repeats):
                began = time.perf_counter()
                feed.set_state({**state, "position": position})
                restored = time.perf_counter()
                jax.block_until_ready(next(feed))
                samples.append((restored - began, time.perf_counter() - restored))
            restore_s, first_batch_s = (statistics.median(times) for times in zip(*samples, strict=True))
            found.append(
                {
                    "position": position,
                    "restore_s": restore_s,
                    "first_batch_s": first_batch_s,
                    "samples": samples,
                }
            )
    return found


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--repeats", type=int, default=50)
    options = asked.parse_args()
    measured = resume(options.repeats)
    for each in measured:
        print(
            f"at position {each['position']:>17,}: set_state {each['restore_s'] * 1e3:.2f} ms, "
            f"the first batch {each['first_batch_s'] * 1e3:.2f} ms later"
        )
    save("resume", options, results=measured)
