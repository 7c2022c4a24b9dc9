"""`.npy`, `.npz` and raw binary files as arrays, mapped into memory wherever the format allows it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.sources.formats import npz
from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.mapped_file import Mapped, MappedFile
from feedline._src.sources.formats.npy import read_header
from feedline._src.sources.formats.opening import opening

Array = npt.NDArray[Any]
SUFFIXES = (".npy", ".npz", ".bin")
_WRITERS = {".npy": "numpy.save", ".npz": "numpy.savez", ".bin": "ndarray.tofile"}
_LOST_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16"}  # the most common one of each size in bytes


class Loaded(NamedTuple):
    """The contents of a file.

    Attributes:
      arrays: an array, or a dict of arrays by name.
      version: of the file; to be checked before each read of the arrays.
    """

    arrays: Any
    version: FileVersion


def load(path: Path, dtype: Any = None) -> Loaded:
    """The array of a `.npy` file, the arrays of a `.npz` file by name, or a `.bin` file as elements of `dtype`.

    A `.npy` file, a `.bin` file and the stored members of a `.npz` file (`numpy.savez`) are mapped: their
    rows are read from disk when they are used. Compressed members (`numpy.savez_compressed`) are read whole.
    Records (a structured dtype) become a dict of their fields.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is truncated, damaged, of another format, holds Python objects, or is raw and `dtype` is None.
      TypeError: its elements are bytes whose dtype `numpy.save` has lost.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a file of arrays ends in {', '.join(SUFFIXES)}, got {path}; convert it with numpy.save")
    with opening(path) as opened:
        file = MappedFile(opened)
        return Loaded(arrays_in(file, opened, str(path), dtype), file.version)


def arrays_in(file: Mapped, opened: BinaryIO, path: str, dtype: Any) -> Any:
    """As `load`, of a file that is mapped and open."""
    suffix = PurePosixPath(path).suffix
    try:
        if suffix == ".npz":
            arrays: Any = npz.read_members(file, opened)
        elif suffix == ".npy":
            arrays = file.array(read_header(opened.read, len(file.bytes)), 0)
        else:
            arrays = _raw(file, dtype)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as a {suffix} file of numbers: {error}. It may be truncated or "
            f"another format; write it again with {_WRITERS[suffix]}"
        ) from error
    if suffix != ".bin":
        for name, array in (arrays if isinstance(arrays, dict) else {"": arrays}).items():
            _check_dtype(path, name, array)
    return arrays if isinstance(arrays, dict) else fields(arrays)


def _check_dtype(path: str, name: str, array: Array) -> None:
    """Refuse elements of raw bytes, which is how `numpy.save` writes dtypes that are not NumPy's own."""
    dtype = array.dtype
    inner = [dtype] if dtype.names is None else [dtype[field] for field in dtype.names]
    lost = next((dtype for dtype in inner if dtype.base.kind == "V" and dtype.base.names is None), None)
    if lost is None:
        return
    guess = f"ml_dtypes.{_LOST_DTYPES.get(lost.itemsize, 'bfloat16')}"
    row = guess if array.ndim == 1 else f"np.dtype(({guess}, {array.shape[1:]}))"
    raise TypeError(
        f"{path}{name and ': '}{name}: elements of {lost.itemsize} bytes have lost their dtype: numpy.save knows "
        "NumPy's own dtypes alone, and not bfloat16 or float8. Write array.tofile('x.bin'), and open it with "
        f"feedline.open_source('x.bin', dtype={row})"
    )


def _raw(file: Mapped, dtype: Any) -> Array:
    """The array of a file that consists only of elements of one dtype."""
    if dtype is None:
        raise ValueError(
            "raw bytes do not say what they are; pass their dtype: feedline.open_source(path, dtype=...)"
        )
    size = len(file.bytes)
    if size % dtype.itemsize:
        raise ValueError(f"it has {size} bytes, no multiple of the {dtype.itemsize} that one {dtype} takes")
    return np.ndarray(size // dtype.itemsize, dtype, file.bytes)


def fields(array: Array) -> Any:
    """An array of records as a dict of its fields, which are views; any other array as it is.

    Example:
      >>> fields(np.zeros(2, [("x", np.uint8, (3,)), ("y", np.int32)]))["x"].shape
      (2, 3)
    """
    if array.dtype.names is None:
        return array
    return {name: fields(array[name]) for name in array.dtype.names}
