"""Labelled rows with a training part and a test part: the digits, a user's files, or synthetic rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.options import checked_integer
from feedline._src.rows.source import Source
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.as_source import as_source
from feedline._src.sources.open_source import open_source

DIGITS = Path(__file__).parent / "digits"
TEST_EVERY = 5
_FEATURES = 256
_CLASSES = 10


class Labelled(NamedTuple):
    """A data set for classification. A row is {"image": [...] of any numeric dtype, "label": an integer}.

    Attributes:
      train: a source for `feedline.Feed`.
      test: a source of other rows, in the same format.
      classes: labels are 0 … classes − 1.
    """

    train: Source
    test: Source
    classes: int


def digits() -> Labelled:
    """1,437 and 360 handwritten digits, 8 × 8 pixels in bytes, that ship with feedline.

    Example:
      >>> len(digits().train), len(digits().test), digits().classes
      (1437, 360, 10)
    """
    return from_files(DIGITS / "train", DIGITS / "test")


def from_files(path: Path, test_path: Path | None = None) -> Labelled:
    """A user's own labelled rows.

    Args:
      path: what `feedline.open_source` opens, with the leaves image [...] and label, an integer; or a directory
        with `image.npy` [n, ...] and `label.npy` [n].
      test_path: the test part. None: every fifth row of `path` (0, 5, 10, …) is held out.

    Raises:
      FileNotFoundError, ValueError, TypeError: the files do not exist, or have another format.
    """
    rows, classes = _opened(path)
    if test_path is None:
        if len(rows) < 2:
            raise ValueError(f"a set needs a row to train on and one to hold out, {path} has 1; add rows")
        return Labelled(Holdout(rows, "train"), Holdout(rows, "test"), classes)
    test, test_classes = _opened(test_path)
    if test.spec["image"].shape != rows.spec["image"].shape:
        raise ValueError(
            f"test images must have the shape of training images, {list(rows.spec['image'].shape)} in {path}, "
            f"but {test_path} has {list(test.spec['image'].shape)}; prepare both in the same way"
        )
    return Labelled(rows, test, max(classes, test_classes))


def synthetic(rows: int) -> Labelled:
    """Synthetic rows that can be learnt, the same in every process: noise around one centre for each class.

    Host bytes: 1.2 × rows × 260, and while they are generated twice as many.

    Args:
      rows: training rows, of images of 256 bytes and 10 classes; the test part has a fifth of that number.
    """
    random = np.random.default_rng(0)
    centres = random.integers(128, size=(_CLASSES, _FEATURES), dtype=np.uint8)

    def made(count: int) -> Source:
        label = random.integers(_CLASSES, size=count, dtype=np.int32)
        image = random.integers(128, size=(count, _FEATURES), dtype=np.uint8)
        image += centres[label]
        return ArraySource([{"image": image, "label": label}])

    checked_integer("rows", rows, at_least=1)
    return Labelled(made(rows), made(-(-rows // TEST_EVERY)), _CLASSES)


class Holdout(Source):
    """A `Source` of one part of another source: rows r with r % 5 == 0 ("test"), or all other rows ("train").

    The row indices are computed, so the split needs no memory and no time at the start.

    Example:
      >>> rows = ArraySource([{"x": np.arange(12)}])
      >>> [Holdout(rows, part).rows_of(np.arange(len(Holdout(rows, part)))).tolist() for part in ("train", "test")]
      [[1, 2, 3, 4, 6, 7, 8, 9, 11], [0, 5, 10]]
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

    def rows_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row indices in the base source, of row indices in this part."""
        if self.part == "test":
            return rows * TEST_EVERY
        return rows + rows // (TEST_EVERY - 1) + 1

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        self.base.read(self.rows_of(rows), out)

    def close(self) -> None:
        self.base.close()


def _opened(path: Path) -> tuple[Source, int]:
    """The rows of files, and how many classes there are: one more than the largest label."""

    def part(*names: str) -> Any:
        if path.is_dir():
            return ArraySource([{name: path / f"{name}.npy" for name in names}])
        return as_source(open_source(path, columns=names))

    rows, labels = part("image", "label"), part("label")
    leaf = labels.spec["label"]
    if leaf.shape or leaf.dtype.kind not in "iu":
        raise ValueError(
            f"label must be one integer a row, {path} has {leaf.dtype}{list(leaf.shape)}; turn one-hot labels "
            "into class numbers with argmax(axis=-1)"
        )
    label = np.empty(len(labels), leaf.dtype)
    labels.read(np.arange(len(label)), {"label": label})
    labels.close()
    least, most = int(label.min()), int(label.max())
    if least < 0 or most >= len(label):
        raise ValueError(
            f"labels must be class numbers 0, 1, 2, …, {path} has {least} to {most} in {len(label)} rows; "
            "numpy.unique(label, return_inverse=True) renumbers them"
        )
    return rows, most + 1
