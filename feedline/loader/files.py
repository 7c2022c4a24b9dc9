"""`.npy` and `.npz` files as arrays, mapped into memory wherever the format allows it."""

from __future__ import annotations

import errno
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SUFFIXES = (".npy", ".npz")
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: the lengths of its name and extra field


def load(path: Path) -> Array | dict[str, Array]:
    """The array of a `.npy` file, or the arrays of a `.npz` file by name.

    A `.npy` file and the stored members of a `.npz` file (`numpy.savez`) are mapped: their rows are
    read from disk when they are asked for. Compressed members (`numpy.savez_compressed`) are read whole.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is truncated, no such file, or holds Python objects.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"files of rows end in {' or '.join(SUFFIXES)}, got {path}; convert it with numpy.save")
    try:
        return _map_npy(path, 0) if path.suffix == ".npy" else _load_npz(path)
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
            "another format; write it again with numpy.save or numpy.savez"
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
