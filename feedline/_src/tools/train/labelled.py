"""Labelled rows with a training part and a test part: the digits, or a user's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.rows.source import Source
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.as_source import as_source
from feedline._src.sources.open_source import open_source

DIGITS = Path(__file__).parent / "digits"
TEST_EVERY = 5


class Labelled(NamedTuple):
    """Two sources for `feedline.Feed`, of rows {"image": [...] of any numeric dtype, "label": 0 … classes − 1}.

    Attributes:
      train, test: the rows to train on, and those held out.
      classes: the number of classes.
    """

    train: Source
    test: Source
    classes: int


def digits() -> Labelled:
    """Handwritten digits that ship with feedline, 8 × 8 bytes each: 1,437 to train on, and 360 to test on.

    Example:
      >>> len(digits().train), len(digits().test), digits().classes
      (1437, 360, 10)
    """
    return from_files(DIGITS / "train", DIGITS / "test")


def from_files(path: Path, test_path: Path | None = None) -> Labelled:
    """A user's own labelled rows: what `feedline.open_source` opens, or a directory with image.npy and label.npy.

    Without `test_path`, every fifth row of `path` (0, 5, 10, …) is held out for the test.
    """
    rows, classes = _opened(path)
    if test_path is None:
        if len(rows) < 2:
            raise ValueError(f"a set needs a row to train on and one to hold out, but {path} has 1; add rows")
        return Labelled(Holdout(rows, "train"), Holdout(rows, "test"), classes)
    test, test_classes = _opened(test_path, of_test=True)
    if test.spec["image"].shape != rows.spec["image"].shape:
        raise ValueError(
            f"test images must have the shape of training images, {list(rows.spec['image'].shape)} in {path}, "
            f"but {test_path} has {list(test.spec['image'].shape)}; prepare both in the same way"
        )
    if test_classes > classes:
        raise ValueError(
            f"test labels must be classes of the training data, 0 to {classes - 1} in {path}, but {test_path} has "
            f"{test_classes - 1}; add training rows of that class, or leave its test rows out"
        )
    return Labelled(rows, test, classes)


class Holdout(Source):
    """A `Source` of one part of another source: rows r with r % 5 == 0 ("test"), or all other rows ("train").

    The row indices are computed, so the split needs no memory and no time at the start.
    """

    def __init__(self, base: Source, part: Literal["train", "test"]) -> None:
        self.base = base
        self.part = part
        self.spec = base.spec

    @property
    def identity(self) -> dict[str, Any]:
        return {"holdout": self.part, "every": TEST_EVERY, "of": self.base.identity}

    def __len__(self) -> int:
        test_rows = -(-len(self.base) // TEST_EVERY)
        return test_rows if self.part == "test" else len(self.base) - test_rows

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        in_base = rows * TEST_EVERY if self.part == "test" else rows + rows // (TEST_EVERY - 1) + 1
        self.base.read(in_base, out)

    def close(self) -> None:
        self.base.close()


def _opened(path: Path, *, of_test: bool = False) -> tuple[Source, int]:
    """The rows of files, and how many classes there are: one more than the largest label."""

    def part(*names: str) -> Any:
        if path.is_dir():
            return ArraySource([{name: path / f"{name}.npy" for name in names}])
        if path.suffix == ".npy" and path.exists():
            raise ValueError(
                f"{path} is one array; save both leaves: numpy.savez('rows.npz', image=..., label=...)"
            )
        return as_source(open_source(path, columns=names))

    rows, labels = part("image", "label"), part("label")
    leaf = labels.spec["label"]
    if leaf.shape or leaf.dtype.kind not in "iu":
        raise ValueError(
            f"label must be one integer a row, but {path} has {leaf.dtype}{list(leaf.shape)}; turn one-hot labels "
            "into class numbers with argmax(axis=-1)"
        )
    label = np.empty(len(labels), leaf.dtype)
    labels.read(np.arange(len(label)), {"label": label})
    labels.close()
    least, most = int(label.min()), int(label.max())
    if least < 0 or (most >= len(label) and not of_test):  # a test set may have fewer rows than classes
        raise ValueError(
            f"labels must be class numbers 0, 1, 2, …, but {path} has {least} to {most} in {len(label)} rows; "
            "numpy.unique(label, return_inverse=True) renumbers them"
        )
    return rows, most + 1
