"""`.npy`, `.npz` and raw binary files as arrays, mapped into memory wherever the format allows it."""

from __future__ import annotations

import errno
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SUFFIXES = (".npy", ".npz", ".bin")
_WRITERS = {".npy": "numpy.save", ".npz": "numpy.savez", ".bin": "ndarray.tofile"}
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: the lengths of its name and extra field


def load(path: Path, dtype: Any = None) -> Any:
    """The array of a `.npy` file, the arrays of a `.npz` file by name, or a `.bin` file as elements of `dtype`.

    A `.npy` file and the stored members of a `.npz` file (`numpy.savez`) are mapped: their rows are
    read from disk when they are asked for. Compressed members (`numpy.savez_compressed`) are read whole.
    A `.bin` file is mapped. Records (a structured dtype) become a dict of their fields.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is truncated, no such file, holds Python objects, or is raw and `dtype` is None.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a file of arrays ends in {', '.join(SUFFIXES)}, got {path}; convert it with numpy.save")
    try:
        if path.suffix == ".npy":
            return fields(_map_npy(path, 0))
        return _load_npz(path) if path.suffix == ".npz" else fields(_map_raw(path, dtype))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE,
            "a mapped file keeps a descriptor open, and this process may open no more (ulimit -n); raise that "
            "limit, or merge shards",
            str(path),
        ) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} cannot be read as a {path.suffix} file of numbers: {error}. It may be truncated or "
            f"another format; write it again with {_WRITERS[path.suffix]}"
        ) from error


def _map_npy(path: Path, offset: int, size: int | None = None) -> Array:
    """Map the `.npy` that starts at byte `offset` of a file."""
    with path.open("rb") as file:
        file.seek(offset)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError("it holds Python objects (dtype object), which cannot be mapped or placed")
    needed = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    found = path.stat().st_size if size is None else offset + size
    if needed > found:
        raise ValueError(f"its header promises {needed - offset} bytes, but there are {found - offset}")
    if 0 in shape:
        return np.empty(shape, dtype)
    mapped = np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")
    return np.asarray(mapped)


def _map_raw(path: Path, dtype: Any) -> Array:
    """Map a file that is nothing but elements of one dtype."""
    if dtype is None:
        raise ValueError("raw bytes do not say what they are; feedline.open_source(path, dtype=...) does")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"it has {size} bytes, no multiple of the {dtype.itemsize} that one {dtype} takes")
    if size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


def fields(array: Array) -> Any:
    """An array of records as a dict of its fields, which are views; any other array as it is.

    Example:
      >>> fields(np.zeros(2, [("x", np.uint8, (3,)), ("y", np.int32)]))["x"].shape
      (2, 3)
    """
    if array.dtype.names is None:
        return array
    return {name: fields(array[name]) for name in array.dtype.names}


def _load_npz(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
                arrays[name] = _map_npy(path, start, member.file_size)
            else:
                with archive.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays
