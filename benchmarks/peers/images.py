"""How many JPEGs per second does each loader deliver as cropped uint8 batches, on the same cores?

`images_limit` is feedline's decoders alone. feedline's claims are refuted if it reaches less than 0.92 of this
limit, or less than 1.2 × the best of the others.

    python benchmarks/peers/images.py --out images.json       # ten minutes, after the first time

Each entrant makes random crops, half of them mirrored, of the same files. Before the rounds, each must deliver an
epoch of images that are recognised after any crop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.contest import DEVICES, Case, contest, parser, saved, thread_count
from peers.images_data import described, marked_jpegs, photo_jpegs
from peers.standings import ranked, rates_of, shown

LIMIT, OURS = "images_limit", "images_feedline"
ENTRANTS = (LIMIT, OURS, "images_grain", "images_spdl", "images_spdl_same", "images_tf_data", "images_torch")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; with --quick 48 images of 64 pixels, and 2 rounds of 0.2 s."""
    asked = parser(__doc__ or "", ENTRANTS, seconds=8.0, warm_up_s=2.0)
    asked.add_argument("--images", type=int, default=5000, help="files of about 100 kB, read from the page cache")
    asked.add_argument("--size", type=int, default=224, help="height and width of an image in a batch")
    asked.add_argument("--batch-rows", type=int, default=256, help="images in a batch")
    options = asked.parse_args(arguments)
    options.only = [name for name in ENTRANTS if name in options.only]
    if options.quick:
        small = {"images": 48, "size": 64, "batch_rows": 16, "rounds": 2, "seconds": 0.2, "warm_up_s": 0.1}
        options = argparse.Namespace(**{**vars(options), **small})
    if options.batch_rows % DEVICES or not 0 < options.batch_rows <= options.images or options.size < 1:
        asked.error(
            f"a batch has a multiple of {DEVICES} images and at most all of them, got --batch-rows "
            f"{options.batch_rows}, --images {options.images} and --size {options.size}"
        )
    return options


def compete(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print; the keys of the result are those of `contest`, and "data"."""

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
    return {**contest("images", options, [case], standings, table), "data": data}


def standings(samples: Sequence[Mapping[str, Any]], row_bytes: int) -> dict[str, Any]:
    """{"entrants": the result of `ranked`, "best_other": the fastest that is neither feedline nor the limit}."""
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
