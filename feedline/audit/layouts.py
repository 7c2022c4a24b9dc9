"""On how many processes and meshes a feed is run, with which options, and what resumes what. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

AXES = ("data", "model")
ALONE = "one device"
_FEWEST_DEVICES = 4  # for a mesh with both axes, on one process too

Arrangement = Literal["in order", "permuted", "across"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One run of the feed.

    Attributes:
      name: for the report.
      processes, devices: how many; all devices of all processes.
      mesh: size of the axes data and model. It may leave out devices of a single process.
      arrangement: of devices in the mesh. "permuted": later processes first, and no two adjacent rows of the
        mesh on devices of one process. "across": the model axis pairs devices of different processes.
      threads, workers: None: as the feed has them. With `threads` each batch is read in so many parts.
      times: the batch size is so many times the feed's.
      saves: the file that state is saved to after each batch, lanes to folders beside it; the layout then ends
        half way.
      killed: it ends by SIGKILL.
      resumes: the file whose state it goes on from.
    """

    name: str
    processes: int
    devices: int
    mesh: tuple[int, int]
    arrangement: Arrangement = "in order"
    threads: int | None = None
    workers: int | None = None
    times: int = 1
    saves: str = ""
    killed: bool = False
    resumes: str = ""

    @property
    def alone(self) -> bool:
        """Whether this is the layout that all others are compared with."""
        return self.name == ALONE

    @property
    def title(self) -> str:
        """Its name among the layouts of all launches."""
        return f"{self.name!r} on {self.processes} process{'es' if self.processes > 1 else ''}"

    def arranged(self, devices: Sequence[Any]) -> Any:
        """The array of devices for `jax.sharding.Mesh(…, AXES)`.

        Example:
          >>> Layout("", 2, 4, (4, 1), "permuted").arranged([0, 1, 2, 3])[:, 0].tolist()
          [3, 1, 2, 0]
        """
        data, model = self.mesh
        chosen = np.array(devices)[: data * model]
        if self.arrangement == "permuted":
            chosen = chosen.reshape(2, -1).T.ravel()[::-1]
        return chosen.reshape(model, data).T if self.arrangement == "across" else chosen.reshape(data, model)


def devices_for(counts: Sequence[int]) -> int:
    """How many devices, over all processes, every layout runs on."""
    devices = math.lcm(*counts)
    while devices < _FEWEST_DEVICES or devices % 2:
        devices *= 2
    return devices


def launches(counts: Sequence[int]) -> list[list[Layout]]:
    """The layouts of each launch of processes, in the order in which they run.

    One device of one process comes first: all others are compared with it. Each launch goes on from what the one
    before it saved. A single process is launched twice, or nothing would resume.

    Example:
      >>> [layout.name for layout in launches([1])[1]]
      ['resumed after a stop', 'resumed after kill -9', 'resumed, batch size × 2']
    """
    devices = devices_for(counts)
    one = Layout(ALONE, 1, devices, (1, 1))
    found = [[one, *_options(one), *_meshes(1, devices), *_ends(1, devices)]]
    for before, processes in itertools.pairwise(counts):
        found.append(
            [*_resumed(before, processes, devices), *_meshes(processes, devices), *_ends(processes, devices)]
        )
    if len(counts) == 1:
        found.append(_resumed(1, 1, devices))
    twice = _resumed(counts[-2:][0], counts[-1], devices)[0]
    found[-1].insert(2, dataclasses.replace(twice, name="resumed, batch size × 2", times=2))
    if counts[-1] != counts[0]:
        found[-1] = [layout for layout in found[-1] if not layout.saves]  # nothing comes after it
    return found


def _options(one: Layout) -> list[Layout]:
    change = dataclasses.replace
    return [
        change(one, name="one thread", threads=1),
        change(one, name="four threads a batch", threads=4),
        change(one, name="two workers", workers=2),
        change(one, name="batch size × 2", times=2),
    ]


def _meshes(processes: int, devices: int) -> list[Layout]:
    data, both = (devices, 1), (devices // 2, 2)
    return [
        Layout("data", processes, devices, data),
        Layout("permuted devices", processes, devices, data, "permuted", threads=2),
        Layout("data × model", processes, devices, both),
        Layout("model across processes", processes, devices, both, "across"),
    ][: 4 if processes > 1 else 3]


def _ends(processes: int, devices: int) -> list[Layout]:
    whole = (devices, 1)
    return [
        Layout("stopped half way", processes, devices, whole, saves=f"stopped-{processes}"),
        Layout("killed half way", processes, devices, whole, saves=f"killed-{processes}", killed=True),
    ]


def _resumed(before: int, processes: int, devices: int) -> list[Layout]:
    return [
        Layout("resumed after a stop", processes, devices, (devices // 2, 2), resumes=f"stopped-{before}"),
        Layout("resumed after kill -9", processes, devices, (devices, 1), "permuted", resumes=f"killed-{before}"),
    ]
