"""The entrants of the peers benchmark: each is a folder of benchmarks/peers, run in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers_environments import interpreter_for
from peers_process import Peer

READERS = Path(__file__).with_name("peers")
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
_PREPARE_LIMIT_S, _CHECK_LIMIT_S, _MEASURE_LIMIT_S = 1800.0, 300.0, 180.0


class Entrant:
    """An entrant with its running process. The contest owns and closes it.

    Each method raises `CannotRun`, and closes the entrant, if the process ends or does not answer.

    Args:
      name: one of ENTRANTS.
      environments: the argument `folder` of `interpreter_for`.
      work: folder for its log, and for the data in its own format.
      threads: number of cores that it may use.

    Raises:
      CannotRun: its environment cannot be created.
    """

    def __init__(self, name: str, environments: Path | None, work: Path, threads: int) -> None:
        interpreter = interpreter_for(READERS / name / "requirements.txt", environments)
        self.name = name
        self._work = work
        self._threads = threads
        self._peer = Peer(interpreter, READERS / "consume.py", READERS / name / "reader.py", work / f"{name}.log")
        self.close = self._peer.close

    def check(self, data: Path, row_bytes: int, batch_rows: int, limit: int | None) -> dict[str, Any]:
        """Convert the data to its own format if needed, then compare `limit` batches; None: a whole epoch."""
        task = self._task(data, row_bytes, batch_rows)
        prepared = self._peer.ask({"do": "prepare", "task": task}, _PREPARE_LIMIT_S)
        found = self._peer.ask({"do": "check", "task": task, "limit": limit}, _CHECK_LIMIT_S)
        right = not (found["wrong"] or found["repeated"] or found["missing"])
        return {"prepare_s": prepared["seconds"], **found, "right": right}

    def measure(
        self,
        data: Path,
        row_bytes: int,
        batch_rows: int,
        warm_up_s: float,
        seconds: float,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Measure one round: rows and seconds. `settings` override the reader's own."""
        request = {"do": "measure", "warm_up_s": warm_up_s, "seconds": seconds, "settings": settings or {}}
        task = self._task(data, row_bytes, batch_rows)
        found = self._peer.ask({**request, "task": task}, _MEASURE_LIMIT_S)
        return {**found, "rows_per_s": found["rows"] / found["seconds"]}

    def describe(self) -> dict[str, Any]:
        """Its settings, those of its sweep, and the versions of the packages that it has imported."""
        return self._peer.ask({"do": "describe"}, _CHECK_LIMIT_S)

    def _task(self, data: Path, row_bytes: int, batch_rows: int) -> dict[str, Any]:
        """The fields of consume.py's Task."""
        return {
            "file": str(data),
            "row_bytes": row_bytes,
            "batch_rows": batch_rows,
            "threads": self._threads,
            "folder": str(self._work / f"{self.name}-{data.stem}-{row_bytes}"),
        }
