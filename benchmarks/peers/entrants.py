"""The entrants of the benchmarks of peers: each is a folder of readers/, run in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.environments import interpreter_for
from peers.process import Peer

READERS = Path(__file__).with_name("readers")
LIMIT = "limit"
GATHER = "gather"
FEEDLINE = "feedline"
PAIR = ("feedline_records", "grain_records_best")
"""feedline and Grain over the same records; adjacent in ENTRANTS, so that a round measures one after the other."""

ENTRANTS = (
    LIMIT,
    GATHER,
    FEEDLINE,
    "numpy",
    "grain_batches",
    *PAIR,
    "grain_records",
    "spdl",
    "jax_dataloader",
    "torch_batched",
    "torch_usual",
    "tf_data_gather",
    "tf_data_slices",
    "mosaic_streaming",
    "litdata",
)
IMAGES_LIMIT = "images_limit"
IMAGES_FEEDLINE = "images_feedline"
IMAGE_ENTRANTS = (
    IMAGES_LIMIT,
    IMAGES_FEEDLINE,
    "images_grain",
    "images_spdl",
    "images_spdl_same",
    "images_tf_data",
    "images_torch",
)
"""The entrants of the benchmark of images."""
_PREPARE_LIMIT_S, _CHECK_LIMIT_S, _MEASURE_LIMIT_S = 1800.0, 300.0, 180.0


class Entrant:
    """An entrant with its running process. The contest owns and closes it.

    Each method raises `CannotRun`, and closes the entrant, if the process ends or does not answer.

    Args:
      name: one of ENTRANTS or IMAGE_ENTRANTS.
      environments: the argument `folder` of `interpreter_for`.
      work: folder for its log, and for the data in its own format.

    Raises:
      CannotRun: its environment cannot be created.
    """

    def __init__(self, name: str, environments: Path | None, work: Path) -> None:
        interpreter = interpreter_for(READERS / name / "requirements.txt", environments)
        work.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._work = work
        self._peer = Peer(
            interpreter, READERS.with_name("consume.py"), READERS / name / "reader.py", work / f"{name}.log"
        )
        self.close = self._peer.close

    def check(self, task: dict[str, Any], limit: int | None) -> dict[str, Any]:
        """Convert the data to its own format if needed, then compare `limit` batches; None: a whole epoch."""
        own = self._own(task)
        prepared = self._peer.ask({"do": "prepare", "task": own}, _PREPARE_LIMIT_S)
        found = self._peer.ask({"do": "check", "task": own, "limit": limit}, _CHECK_LIMIT_S)
        right = not (found["wrong"] or found["repeated"] or found["missing"])
        return {"prepare_s": prepared["seconds"], **found, "right": right}

    def measure(self, task: dict[str, Any], warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Measure one round: rows and seconds."""
        request = {"do": "measure", "warm_up_s": warm_up_s, "seconds": seconds}
        found = self._peer.ask({**request, "task": self._own(task)}, _MEASURE_LIMIT_S)
        return {**found, "rows_per_s": found["rows"] / found["seconds"]}

    def train(self, task: dict[str, Any], steps: int, step_s: float) -> dict[str, Any]:
        """The cost of a batch for a training thread whose step takes `step_s`, and the memory after each step."""
        request = {"do": "train", "task": self._own(task), "steps": steps, "step_s": step_s}
        return self._peer.ask(request, _MEASURE_LIMIT_S + steps * step_s)

    def describe(self) -> dict[str, Any]:
        """Its settings, and the versions of the packages that it has imported."""
        return self._peer.ask({"do": "describe"}, _CHECK_LIMIT_S)

    def _own(self, task: dict[str, Any]) -> dict[str, Any]:
        """The task, with a folder of this entrant's own."""
        return {**task, "folder": str(self._work / f"{self.name}-{task['folder']}")}
