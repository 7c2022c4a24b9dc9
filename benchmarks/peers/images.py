"""How many JPEGs per second does each loader deliver as cropped uint8 batches, on the same cores?

`images_limit` is feedline's decoders alone. feedline's claims are refuted by less than 0.92 of it, by less than
1.2 × the best of the others, by memory that grows, or by a training thread that pays more than for columns.

    python benchmarks/peers/images.py --out images.json       # ten minutes, after the first time

Each entrant makes random crops, half of them mirrored, of the same files. First it must deliver an epoch of images
that are recognised after any crop. At last feedline runs in a training loop that sleeps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.contest import DEVICES, Case, contest, parser, saved, thread_count
from peers.entrant import CannotRun, Entrant
from peers.images_data import described, marked_jpegs, photo_jpegs
from peers.standings import ranked, rates_of, shown

LIMIT, OURS = "images_limit", "images_feedline"
ENTRANTS = (LIMIT, OURS, "images_grain", "images_spdl", "images_spdl_same", "images_tf_data", "images_torch")
_STEP_OF_BATCH = 1.2
"""The step of the training loop ÷ the time in which a batch is made: the threads are nearly always busy."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; with --quick 48 images of 64 pixels, and 2 rounds of 0.2 s."""
    asked = parser(__doc__ or "", ENTRANTS, seconds=8.0, warm_up_s=2.0)
    asked.add_argument("--images", type=int, default=5000, help="files of about 100 kB, read from the page cache")
    asked.add_argument("--size", type=int, default=224, help="height and width of an image in a batch")
    asked.add_argument("--batch-rows", type=int, default=256, help="images in a batch")
    asked.add_argument("--train-steps", type=int, default=100, help="steps of the training loop")
    options = asked.parse_args(arguments)
    options.only = [name for name in ENTRANTS if name in options.only]
    if options.quick:
        small = {"images": 48, "size": 64, "batch_rows": 16, "train_steps": 10, "rounds": 2}
        options = argparse.Namespace(**{**vars(options), **small, "seconds": 0.2, "warm_up_s": 0.1})
    if options.batch_rows % DEVICES or not 0 < options.batch_rows <= options.images or options.size < 1:
        asked.error(
            f"a batch has a multiple of {DEVICES} images and at most all of them, got --batch-rows "
            f"{options.batch_rows}, --images {options.images} and --size {options.size}"
        )
    return options


def compete(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print; the keys of the result are those of `contest`, "data" and "training"."""

    def task(folder: Path, batch_rows: int) -> dict[str, Any]:
        sizes = {"size": options.size, "batch_rows": batch_rows, "threads": thread_count()}
        return {"kind": "images", "images": str(folder), "folder": folder.name, **sizes}

    photographs = photo_jpegs(options.work, options.images)
    data = described(photographs)
    shipped = ", ".join(f"{name} ({path})" for name, path in data["photographs"].items())
    print(
        f"{data['files']:,} JPEGs of {data['mean_bytes'] / 1e3:.0f} kB in the mean, made of {shipped}", flush=True
    )
    marked = task(marked_jpegs(options.work), DEVICES)
    case = Case(options.size**2 * 3, task(photographs, options.batch_rows), ((marked, None),))
    result = {**contest("images", options, [case], standings, table), "data": data}
    if OURS in result["entrants"]:
        rate = result["standings"][str(case.row_bytes)]["entrants"][OURS]["median_rows_per_s"]
        _train(result, options, case.task, _STEP_OF_BATCH * options.batch_rows / rate)
    return result


def _train(result: dict[str, Any], options: argparse.Namespace, task: dict[str, Any], step_s: float) -> None:
    """Add "training": what feedline costs a training thread, and its memory."""
    try:
        entrant = Entrant(OURS, options.environments, options.work)
        found = entrant.ask("train", task, steps=options.train_steps, step_s=step_s)
        entrant.close()
    except CannotRun as error:
        result["failures"][OURS] = str(error)
        return
    result["training"] = {**found, "step_s": step_s}
    next_us, release_us = (statistics.median(found[name]) for name in ("next_us", "release_us"))
    memory = [each / 2**20 for each in found["resident_bytes"]]
    third = max(1, len(memory) // 3)
    print(
        f"feedline's training thread, in steps of {step_s * 1e3:.0f} ms (medians): {next_us:.0f} µs in next, "
        f"{release_us:.0f} µs to release a batch; memory after step {third}: {memory[third - 1]:.0f} MiB, "
        f"the most after that {max(memory[third - 1 :]):.0f}, at the end {memory[-1]:.0f}",
        flush=True,
    )


def standings(samples: Sequence[Mapping[str, Any]], row_bytes: int) -> dict[str, Any]:
    """{"entrants": as of `ranked`, "best_other": the fastest that is neither feedline nor the limit}."""
    entrants = ranked(rates_of(samples, row_bytes), OURS, of_limit=LIMIT)
    return {
        "entrants": entrants,
        "best_other": next((name for name in entrants if name not in (OURS, LIMIT)), None),
    }


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
    if best is not None and OURS in found["entrants"]:
        lines.append(f"feedline ÷ the best other, {best}: {shown(found['entrants'][best]['feedline_over'])}")
    return "\n".join(lines)


if __name__ == "__main__":
    given = options_of()
    sys.exit(saved(compete(given), given))
