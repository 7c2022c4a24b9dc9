"""Digests that identify data by its size and sampled bytes, never by a path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SAMPLES = 16
SAMPLED_BYTES = 1 << 12


def of_file(path: str | os.PathLike[str]) -> list[Any]:
    """Return the size of a file, and a digest of sixteen blocks of 4 KiB, evenly spread over the file."""
    size = os.path.getsize(path)
    with Path(path).open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        return of_samples(size, [read(*part) for part in samples_of_file(size)])


def samples_of_file(size: int) -> list[tuple[int, int]]:
    """Offset and length of each block that `of_file` reads."""
    return [(start, SAMPLED_BYTES) for start in sampled(max(0, size - SAMPLED_BYTES) + 1)]


def of_samples(size: int, samples: Sequence[bytes]) -> list[Any]:
    """Like `of_file`, given the size of the file and the blocks that `samples_of_file` lists."""
    return [size, hashlib.sha256(b"".join(samples)).hexdigest()[:32]]


def of_array(array: npt.NDArray[Any], samples: int = _SAMPLES) -> list[Any]:
    """Return the dtype and shape of an array, and a digest of up to `samples` rows: of each, the first 4 KiB."""
    return of_rows(array.dtype, array.shape, array.__getitem__, samples)


def of_rows(
    dtype: np.dtype[Any], shape: tuple[int, ...], row_at: Callable[[int], Any], samples: int = _SAMPLES
) -> list[Any]:
    """Like `of_array`, for an array whose rows `row_at` reads one at a time."""
    hashed = hashlib.sha256()
    for row in sampled(shape[0], samples):
        hashed.update(np.ascontiguousarray(row_at(row)).reshape(-1).view(np.uint8)[:SAMPLED_BYTES].tobytes())
    return [dtype.str, list(shape), hashed.hexdigest()[:32]]


def sampled(count: int, samples: int = _SAMPLES) -> list[int]:
    """Up to `samples` evenly spaced numbers from 0 to count − 1, both included if `samples` is 2 or more."""
    last = max(count - 1, 0)
    numbers = np.linspace(0, last, samples).astype(np.int64).clip(max=last)  # floats may round `last` up
    return [int(number) for number in np.unique(numbers)][:count]
