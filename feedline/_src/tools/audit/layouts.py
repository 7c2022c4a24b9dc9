"""The layouts that an audit tries: numbers of processes, meshes, options, and resumes. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from feedline._src.listen.words import counted

AXES = ("data", "model")
_FEWEST_DEVICES = 4  # for a mesh with both axes, on one process too


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to run the feed: processes, mesh, options, and which saved state it resumes.

    Attributes:
      devices: of all processes together.
      mesh: sizes of the axes data and model. On a single process the mesh may leave out devices.
      arrangement: the order of the devices in the mesh. "permuted": later processes first, and no two adjacent
        rows of the mesh on devices of one process. "across": the model axis pairs devices of different processes.
      threads, workers: of the feed; None: unchanged. `threads` is also the number of parts of each batch.
      times: multiplies the feed's batch size.
      saves: the file to which the state is saved after each batch. Half way its processes are killed by SIGKILL,
        with the feed open and reading ahead.
      resumes: the file from which the state is restored.
    """

    name: str
    processes: int
    devices: int
    mesh: tuple[int, int]
    arrangement: Literal["in order", "permuted", "across"] = "in order"
    threads: int | None = None
    workers: int | None = None
    times: int = 1
    saves: str = ""
    resumes: str = ""

    @property
    def is_reference(self) -> bool:
        """Whether all other layouts are compared with this one, which runs first."""
        return self.name == "one device"

    @property
    def title(self) -> str:
        """Unique among the layouts of all launches."""
        return f"{self.name!r} on {counted(self.processes, 'process')}"

    def arranged(self, devices: Sequence[Any]) -> Any:
        """The array of devices for `jax.sharding.Mesh(…, AXES)`."""
        data, model = self.mesh
        chosen = np.array(devices)[: data * model]
        if self.arrangement == "permuted":
            chosen = chosen.reshape(2, -1).T.ravel()[::-1]
        return chosen.reshape(model, data).T if self.arrangement == "across" else chosen.reshape(data, model)


def devices_for(counts: Sequence[int]) -> int:
    """The number of devices, over all processes, of every layout."""
    devices = math.lcm(*counts)
    while devices < _FEWEST_DEVICES or devices % 2:
        devices *= 2
    return devices


def launches(counts: Sequence[int]) -> list[list[Layout]]:
    """The layouts of each launch of processes, in the order in which they run, for ascending counts from 1 on.

    Each launch resumes what the launch before it saved. A single count is launched twice, so that there is
    something to resume.
    """
    devices = devices_for(counts)
    data, both = (devices, 1), (devices // 2, 2)

    def resumed(before: int, layout: Any) -> list[Layout]:
        return [
            layout("resumed after kill -9", mesh=both, resumes=f"killed-{before}"),
            layout("resumed, permuted", mesh=data, arrangement="permuted", resumes=f"killed-{before}"),
        ]

    found = []
    for before, count in itertools.pairwise([0, *counts]):
        layout = functools.partial(Layout, processes=count, devices=devices)
        one = functools.partial(layout, mesh=(1, 1))
        planned = [
            one("one device"),
            one("one thread", threads=1),
            one("four threads a batch", threads=4),
            one("two workers", workers=2),
            one("batch size × 2", times=2),
        ]
        planned = resumed(before, layout) if before else planned
        planned += [
            layout("data", mesh=data),
            layout("permuted devices", mesh=data, arrangement="permuted", threads=2),
            layout("data × model", mesh=both),
        ]
        if count > 1:
            planned.append(layout("model across processes", mesh=both, arrangement="across"))
        if count == 1 or count != counts[-1]:  # a later launch resumes it
            planned.append(layout("killed half way", mesh=data, saves=f"killed-{count}"))
        found.append(planned)
    if len(counts) == 1:
        found.append(resumed(1, layout))
    twice = dataclasses.replace(found[-1][0], name="resumed, batch size × 2", times=2)
    found[-1].insert(2, twice)
    return found
