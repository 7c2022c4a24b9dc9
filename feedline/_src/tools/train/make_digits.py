"""Writes the files in `digits/` from scikit-learn's copy of the data set.

It was run once, by hand, with scikit-learn installed; the package ships its output::

    python -m feedline._src.tools.train.make_digits feedline/_src/tools/train/digits
"""

from __future__ import annotations

import gzip
import importlib.resources
import sys
from pathlib import Path

import numpy as np

TEST_EVERY = 5  # row r of the data set is a test row where r % 5 == 0
SCALE = 15  # a pixel is a number from 0 to 16; times 15 it is 0, 15, …, 240, which fits a byte


def digits() -> dict[str, dict[str, np.ndarray]]:
    """The parts "train" (1,437 rows) and "test" (360 rows): {"image": uint8 [n, 64], "label": int32 [n]}."""
    packed = importlib.resources.files("sklearn.datasets.data").joinpath("digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    table = np.loadtxt(lines, delimiter=",").astype(np.int32)
    leaves: dict[str, np.ndarray] = {"image": (table[:, :-1] * SCALE).astype(np.uint8), "label": table[:, -1]}
    is_test = np.arange(len(table)) % TEST_EVERY == 0
    return {
        part: {name: np.ascontiguousarray(leaf[chosen]) for name, leaf in leaves.items()}
        for part, chosen in (("train", ~is_test), ("test", is_test))
    }


def write(folder: Path) -> None:
    """Writes `folder`/{train,test}/{image,label}.npy."""
    for part, leaves in digits().items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name, leaf in leaves.items():
            np.save(folder / part / f"{name}.npy", leaf)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
