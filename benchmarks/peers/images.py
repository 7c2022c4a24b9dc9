"""How many JPEGs per second does each loader deliver as cropped uint8 batches, on the same cores?

`images_limit` is feedline's decoders alone. feedline's claims are refuted by less than 0.92 of it, by less than
1.2 × the best of the others, by memory that grows, or by a training thread that pays more than for columns.

    python benchmarks/peers/images.py --out images.json       # ten minutes, after the first time
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.contest import DEVICES, Case, contest, thread_count
from peers.entrants import IMAGE_ENTRANTS, IMAGES_FEEDLINE, IMAGES_LIMIT, Entrant
from peers.environments import CannotRun
from peers.images_data import described, marked_jpegs, photo_jpegs
from peers.options import Options
from peers.standings import ranked, rates_of, shown

_STEP_OF_BATCH = 1.2
"""The step of the training loop ÷ the time in which a batch is made: the threads are nearly always busy."""


@dataclasses.dataclass(frozen=True)
class Images(Options):
    """Measure every loader on the same JPEGs, alternately: random crops, half of them mirrored, on CPU devices.

    Each entrant runs in its own process and environment. Each is measured once a round, and stopped between its
    rounds. First it must deliver an epoch of images that are recognised after any crop. Then feedline runs in a
    training loop that sleeps. With --quick: 48 images of 64 pixels, 2 rounds of 0.2 s.

    Attributes:
      images: how many files of about 100 kB are made of photographs, and read from the page cache.
      size: height and width of an image in a batch.
      batch_rows: images in a batch.
      train_steps: steps of the training loop.
    """

    entrants: ClassVar = IMAGE_ENTRANTS

    seconds: float = 8.0
    warm_up_s: float = 2.0
    images: int = 5000
    size: int = 224
    batch_rows: int = 256
    train_steps: int = 100

    def check(self) -> None:
        """Check that the options fit together."""
        super().check()
        if self.batch_rows % DEVICES or not 0 < self.batch_rows <= self.images or self.size < 1:
            raise ValueError(
                f"a batch has a multiple of {DEVICES} images and at most all of them, got --batch-rows "
                f"{self.batch_rows}, --images {self.images} and --size {self.size}"
            )

    def sized(self) -> Images:
        """These options, with the sizes of --quick if it is given."""
        if not self.quick:
            return self
        small = {"images": 48, "size": 64, "batch_rows": 16, "train_steps": 10}
        return dataclasses.replace(self, **small, rounds=2, seconds=0.2, warm_up_s=0.1)

    def sizes(self) -> dict[str, Any]:
        """The number of images, and the sizes of images and batches."""
        return {"images": self.images, "size": self.size, "batch_rows": self.batch_rows}

    def cases(self) -> list[Case]:
        """One: all photographs; before them an epoch of the marked images."""
        marked = self._task(marked_jpegs(self.plan().work), DEVICES)
        photographs = self._task(self.photographs(), self.batch_rows)
        return [Case(self.size * self.size * 3, photographs, ((marked, None),))]

    def photographs(self) -> Path:
        """The folder of JPEGs, made when it is missing."""
        return photo_jpegs(self.plan().work, self.images)

    def _task(self, folder: Path, batch_rows: int) -> dict[str, Any]:
        return {
            "kind": "images",
            "images": str(folder),
            "size": self.size,
            "batch_rows": batch_rows,
            "threads": thread_count(),
            "folder": folder.name,
        }

    def compete(self) -> dict[str, Any]:
        """Run the benchmark; the keys of its result are those of `contest`, "data" and "training"."""
        plan, cases, data = self.plan(), self.cases(), described(self.photographs())
        print(_data_text(data), flush=True)
        result = contest("images", plan, cases, standings, table)
        result["data"] = data
        if IMAGES_FEEDLINE in result["entrants"]:
            self._train(result, cases[0])
        return result

    def _train(self, result: dict[str, Any], case: Case) -> None:
        """Add "training": what feedline costs a training thread, and its memory."""
        plan = self.plan()
        rate = result["standings"][str(case.row_bytes)]["entrants"][IMAGES_FEEDLINE]["median_rows_per_s"]
        step_s = _STEP_OF_BATCH * self.batch_rows / rate
        try:
            entrant = Entrant(IMAGES_FEEDLINE, plan.environments, plan.work)
            found = entrant.train(case.task, self.train_steps, step_s)
            entrant.close()
        except CannotRun as error:
            result["failures"][IMAGES_FEEDLINE] = str(error)
            return
        result["training"] = {**found, "step_s": step_s}
        print(_training_text(found, step_s), flush=True)


def standings(samples: Sequence[Mapping[str, Any]], row_bytes: int) -> dict[str, Any]:
    """{"entrants": as of `ranked`, "best_other": the fastest that is neither feedline nor the limit}."""
    entrants = ranked(rates_of(samples, row_bytes), IMAGES_FEEDLINE, of_limit=IMAGES_LIMIT)
    others = (name for name in entrants if name not in (IMAGES_FEEDLINE, IMAGES_LIMIT))
    return {"entrants": entrants, "best_other": next(others, None)}


def table(result: Mapping[str, Any], row_bytes: int) -> str:
    """The standings as text."""
    found = result["standings"][str(row_bytes)]
    checks = {check["entrant"]: check for check in result["checks"]}
    memory = {sample["entrant"]: sample["resident_bytes"] for sample in result["samples"]}
    lines = [f"{'':<18} {'images/s':>9}  {'÷ limit':<22}  {'feedline ÷ it':<22}  {'GiB':<5}  mean crop, mirrored"]
    for name, entrant in found["entrants"].items():
        check = checks[name]
        lines.append(
            f"{name:<18} {entrant['median_rows_per_s']:>9,.0f}  {shown(entrant['of_limit']):<22}  "
            f"{shown(entrant['feedline_over']):<22}  {memory[name] / 2**30:<5.2f}  "
            f"{check['area']:.2f}, {check['mirrored']:.2f}{'' if check['right'] else '  WRONG IMAGES'}"
        )
    lines += [f"{name:<18} not measured: {why}" for name, why in result["failures"].items()]
    best = found["best_other"]
    if best is not None and IMAGES_FEEDLINE in found["entrants"]:
        lines.append(f"feedline ÷ the best other, {best}: {shown(found['entrants'][best]['feedline_over'])}")
    return "\n".join(lines)


def _data_text(data: Mapping[str, Any]) -> str:
    shipped = ", ".join(f"{name} ({path})" for name, path in data["photographs"].items())
    return f"{data['files']:,} JPEGs of {data['mean_bytes'] / 1e3:.0f} kB in the mean, made of {shipped}"


def _training_text(found: Mapping[str, Any], step_s: float) -> str:
    memory = [each / 2**20 for each in found["resident_bytes"]]
    third = max(1, len(memory) // 3)
    return (
        f"feedline's training thread, in steps of {step_s * 1e3:.0f} ms (medians): "
        f"{statistics.median(found['next_us']):.0f} µs in next, "
        f"{statistics.median(found['release_us']):.0f} µs to release a batch\n"
        f"feedline's memory after step {third}: {memory[third - 1]:.0f} MiB, the most after that "
        f"{max(memory[third - 1 :]):.0f} MiB, at the end {memory[-1]:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(tyro.cli(Images).run())
