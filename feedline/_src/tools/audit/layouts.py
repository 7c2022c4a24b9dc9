"""The layouts that an audit tries: numbers of processes, meshes, options, and resumes. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.listen.words import counted

AXES = ("data", "model")
_FEWEST_DEVICES = 4  # so that both mesh axes have at least two devices, even with one process


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """One way to run the feed: processes, mesh, options, and whether it saves or resumes a state.

    Attributes:
      mesh: int64[data, model], the position of each device in `jax.devices()`.
      threads, workers: how many the feed uses; None: unchanged. With `threads`, the buffer holds one batch, so
        that all threads read parts of the same batch.
      times: multiplies the feed's batch size.
      saves: whether it takes half of the batches and saves the state. SIGKILL then kills its processes, while the
        feed is open and reads ahead.
      resumes: whether it continues from the state that the previous launch saved.
    """

    name: str
    processes: int
    mesh: npt.NDArray[np.int64]
    threads: int | None = None
    workers: int | None = None
    times: int = 1
    saves: bool = False
    resumes: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether all other layouts are compared with this one, which runs first."""
        return self.name == "one device"

    @property
    def title(self) -> str:
        """Unique among the layouts of all launches."""
        return f"{self.name!r} on {counted(self.processes, 'process')}"


def devices_for(counts: Sequence[int]) -> int:
    """The number of devices over all processes, the same in all launches."""
    return max(_FEWEST_DEVICES, math.lcm(2, *counts))


def launches(counts: Sequence[int]) -> list[list[Layout]]:
    """The layouts of each launch of processes, in the order in which they run. `counts` ascend from 1.

    Each launch but the last ends with a layout that saves, and the next launch begins with layouts that
    resume. A single count is launched twice.
    """
    devices = np.arange(devices_for(counts))
    one, data, both = devices[:1, None], devices[:, None], devices.reshape(-1, 2)
    # the last process first; with several processes, adjacent rows of the mesh belong to different processes
    permuted = devices.reshape(2, -1).T.reshape(-1, 1)[::-1]
    found = []
    for before, count in itertools.pairwise([0, *counts] if len(counts) > 1 else [0, *counts, *counts]):
        layout = functools.partial(Layout, processes=count)
        if before:
            planned = [
                layout("resumed after kill -9", mesh=both, resumes=True),
                layout("resumed, permuted", mesh=permuted, resumes=True),
                layout("resumed, batch size × 2", mesh=both, resumes=True, times=2),
            ]
        else:
            planned = [
                layout("one device", mesh=one),
                layout("one thread", mesh=one, threads=1),
                layout("four threads a batch", mesh=one, threads=4),
                layout("two workers", mesh=one, workers=2),
                layout("batch size × 2", mesh=one, times=2),
            ]
        if count > before:
            planned += [
                layout("data", mesh=data),
                layout("permuted devices", mesh=permuted, threads=2),
                layout("data × model", mesh=both),
            ]
        if count > 1:  # the model axis pairs devices of different processes
            planned.append(layout("model across processes", mesh=devices.reshape(2, -1).T))
        found.append([*planned, layout("killed half way", mesh=data, saves=True)])
    found[-1].pop()  # no launch follows to resume it
    return found
