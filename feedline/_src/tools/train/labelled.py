"""Labelled rows with a training part and a test part: the digits, a user's files, or synthetic rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.options import checked_integer
from feedline._src.rows.row_source import RowSource
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.open_source import open_arrays
from feedline._src.tools.train.holdout import TEST_EVERY, Holdout

DIGITS = Path(__file__).parent / "digits"
_LEAVES = ("image", "label")
_BLOCK_ROWS = 1 << 14


class Labelled(NamedTuple):
    """A data set for classification. A row is {"image": [...] of any numeric dtype, "label": an integer}.

    Attributes:
      train: a source for `feedline.Feed`.
      test: a source of other rows, in the same format.
      classes: labels are 0 … classes − 1.
    """

    train: RowSource
    test: RowSource
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
      path: a directory with `image.npy` [n, ...] and `label.npy` int [n], or a `.npz` file with these
        two arrays.
      test_path: the same, for the test part. None: every fifth row of `path` (0, 5, 10, …) is held out.

    Raises:
      FileNotFoundError, ValueError: the files do not exist, or have another format.
    """
    rows = _opened(path)
    classes = _classes(path)
    if test_path is None:
        if len(rows) < 2:
            raise ValueError(f"a set needs a row to train on and one to hold out, {path} has 1; add rows")
        return Labelled(Holdout(rows, "train"), Holdout(rows, "test"), classes)
    test = _opened(test_path)
    if test.spec["image"].shape != rows.spec["image"].shape:
        raise ValueError(
            f"test images must have the shape of training images, {list(rows.spec['image'].shape)} in {path}, "
            f"but {test_path} has {list(test.spec['image'].shape)}; prepare both in the same way"
        )
    return Labelled(rows, test, max(classes, _classes(test_path)))


def synthetic(rows: int, features: int, classes: int) -> Labelled:
    """Synthetic rows that can be learnt, the same in every process: noise around one centre for each class.

    Host bytes: 1.2 × rows × (features + 4).

    Args:
      rows: training rows; the test part has a fifth of that number.
      features: bytes in one image.
      classes: labels are 0 … classes − 1.
    """
    for name, value in (("rows", rows), ("features", features), ("classes", classes)):
        checked_integer(name, value, at_least=1)
    random = np.random.default_rng(0)
    centres = random.integers(128, size=(classes, features), dtype=np.uint8)

    def made(count: int) -> RowSource:
        label = random.integers(classes, size=count, dtype=np.int32)
        image = random.integers(128, size=(count, features), dtype=np.uint8)
        for start in range(
            0, count, _BLOCK_ROWS
        ):  # in blocks, because centres[label] would need as much memory as all images
            block = slice(start, start + _BLOCK_ROWS)
            image[block] += centres[label[block]]
        return ArraySource([{"image": image, "label": label}])

    return Labelled(made(rows), made(-(-rows // TEST_EVERY)), classes)


def _opened(path: Path) -> RowSource:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or directory {path}; check the path")
    if path.suffix != ".npz" and not path.is_dir():
        raise ValueError(
            f"data is a .npz file with arrays image and label, or a directory with image.npy and label.npy, "
            f"got {path}; numpy.savez('{path.stem}.npz', image=..., label=...) writes one"
        )
    files = {name: path / f"{name}.npy" for name in _LEAVES}
    rows = ArraySource([files]) if path.is_dir() else open_arrays(path)
    if sorted(rows.spec) != sorted(_LEAVES):
        raise ValueError(
            f"the arrays must be named image and label, {path} has {', '.join(sorted(rows.spec))}; "
            f"numpy.savez('{path.stem}.npz', image=..., label=...) writes such a file"
        )
    return rows


def _classes(path: Path) -> int:
    """One more than the largest label: labels are class numbers from 0."""
    label: npt.NDArray[Any]
    if path.is_dir():
        label = np.load(path / "label.npy", mmap_mode="r")
    else:
        with np.load(path) as arrays:
            label = arrays["label"]
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise ValueError(
            f"label must be one integer a row, int [n], {path} has {label.dtype}{list(label.shape)}; "
            "turn one-hot labels into class numbers with argmax(axis=-1)"
        )
    least, most = int(label.min()), int(label.max())
    if least < 0 or most >= len(label):
        raise ValueError(
            f"labels must be class numbers 0, 1, 2, …, {path} has {least} to {most} in {len(label)} rows; "
            "numpy.unique(label, return_inverse=True) renumbers them"
        )
    return most + 1
