"""`.npy`, `.npz` and raw files. Rows are read in place; a compressed array is read into memory as a whole."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, suffix_of
from feedline._src.formats.table import FileArray, check_memory, fields

Array = npt.NDArray[Any]
HEADER_BYTES = 10_000
"""The longest header that is parsed, as in NumPy, since Python's parser is not safe for long untrusted texts."""


def read(file: File, options: OpenOptions) -> list[Any]:
    """The arrays of a file: one array, or a dict by name. A structured array becomes a dict of its fields."""
    suffix = suffix_of(file.name)
    try:
        if suffix == ".npz":
            arrays = _members(file, options)
        else:
            arrays = {"": _array_at(file.samples([(0, HEADER_BYTES)])[0], file, 0, file.size)}
    except ValueError as error:
        writer = "numpy.savez" if suffix == ".npz" else "numpy.save"
        raise ValueError(
            f"{file.name} cannot be read as a {suffix} file of numbers: {error}. It may be truncated, or in "
            f"another format; write it again with {writer}"
        ) from error
    for name, array in arrays.items():
        if array is not None:
            _check_dtype(f"{file.name}{name and ': '}{name}", array)
    return [options.named(arrays if suffix == ".npz" else fields(arrays[""]), file.name)]


def read_raw(file: File, options: OpenOptions) -> list[Any]:
    """The elements of a file, one after the other, as `ndarray.tofile` writes them."""
    dtype: Any = options.dtype
    if dtype is None or file.size % dtype.itemsize:
        raise ValueError(
            f"{file.name} cannot be read as a .bin file of numbers: raw bytes do not say what they are, so a "
            f"dtype is needed whose size divides the size of the file, got dtype={dtype} and {file.size} bytes; "
            "pass open_source(path, dtype=...), or open the .idx of Megatron-LM beside it. If the dtype is right, "
            "the file is truncated"
        )
    array = FileArray.of(file, dtype, (file.size // dtype.itemsize,), 0)
    return [options.named(fields(array), file.name)]


_OPTIONS = frozenset({"columns", "window", "stride"})
NPY = Format("npy", (".npy", ".npz"), _OPTIONS, way="mapped", open=read, head_bytes=HEADER_BYTES)
RAW = Format("raw", (".bin",), _OPTIONS | {"dtype"}, way="mapped", open=read_raw)


class _Header(NamedTuple):
    """The header of a `.npy`; `start` is the offset of the elements."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def _header_of(begin: bytes, size: int) -> _Header:
    """Parse the header of a `.npy` file or member of `size` bytes. `begin` are its first bytes."""
    stream = io.BytesIO(begin[:HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError("it does not begin like a .npy of version 1.0, 2.0 or 3.0")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        text = _as_version_2(stream) if version == (3, 0) else stream
        shape, fortran, dtype = read(text, max_header_size=HEADER_BYTES)
    except Exception as error:  # NumPy raises many types for arbitrary text
        raise ValueError(f"NumPy cannot read its header ({type(error).__name__}: {error})") from error
    if not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError(f"its shape must be a tuple of lengths, got {shape!r:.200}")
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"its elements must be numbers, and no Python objects, got dtype {dtype!r:.200}")
    needed = stream.tell() + math.prod(shape) * dtype.itemsize
    if needed > size:
        raise ValueError(f"its header promises {needed} bytes, but there are {size}")
    np.broadcast_to(np.empty((), dtype), shape)  # refuses more axes than an array can have
    return _Header(shape, dtype, fortran, stream.tell())


def _as_version_2(stream: io.BytesIO) -> io.BytesIO:
    """Convert the rest of a header of version 3.0 (UTF-8), for which NumPy has no function, to version 2.0."""
    length = int.from_bytes(stream.read(4), "little")
    text = stream.read(length)
    if len(text) != length:
        raise ValueError("its header ends too early")
    text = text.decode().encode("ascii", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)


def _array_at(begin: bytes, file: File, at: int, size: int) -> FileArray:
    """Describe the array of the `.npy` that begins at byte `at` of a file. Other arguments: see `_header_of`."""
    header = _header_of(begin, size)
    return FileArray.of(file, header.dtype, header.shape, at + header.start, header.fortran)


def _members(file: File, options: OpenOptions) -> dict[str, Any]:
    """The arrays of a `.npz`, by name; None for arrays that are not chosen. ValueError: a member is damaged."""
    arrays: dict[str, Any] = {}
    with file.open() as opened:
        try:
            archive = zipfile.ZipFile(opened)
        except Exception as error:  # zipfile raises many types for a damaged directory
            raise ValueError(f"it is no zip archive ({error or type(error).__name__})") from error
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"its members must have different names, and two are called {name!r}")
            if options.columns is not None and name not in options.columns:
                arrays[name] = None
                continue
            try:
                with archive.open(member) as stream:
                    start = opened.tell()  # zipfile has read up to the member's data
                    begin = stream.read(HEADER_BYTES)
                if member.compress_type == zipfile.ZIP_STORED:
                    arrays[name] = _array_at(begin, file, start, member.file_size)
                else:
                    check_memory(file.name, "a compressed array", member.file_size)
                    arrays[name] = _decompressed(archive, member, _header_of(begin, member.file_size))
            except Exception as error:  # zipfile and the decompressors raise many types
                reason = str(error)[:300] or type(error).__name__
                raise ValueError(f"its member {name!r}: {reason}; columns=[...] can leave it out") from error
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays


def _decompressed(archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: _Header) -> Array:
    """Decompress the array of a member. Reads only the bytes that its header promises, even if there are more."""
    with archive.open(member) as stream:
        stream.read(header.start)
        data = stream.read(math.prod(header.shape) * header.dtype.itemsize)
        stream.read(1)  # zipfile compares the checksum when it reaches the end
    return np.ndarray(header.shape, header.dtype, data, order="F" if header.fortran else "C")


def _check_dtype(name: str, array: Any) -> None:
    """Raise TypeError for elements of raw bytes, which `numpy.save` writes for dtypes that are not NumPy's own."""
    dtype = array.dtype
    inner = [dtype] if dtype.names is None else [dtype[field] for field in dtype.names]
    if any(each.base.kind == "V" and each.base.names is None for each in inner):
        raise TypeError(
            f"{name}: elements of dtype {dtype} have lost their dtype: numpy.save keeps only NumPy's own dtypes, "
            "not bfloat16 or float8. Write array.tofile('x.bin'), and open it with feedline.open_source("
            f"'x.bin', dtype=np.dtype((ml_dtypes.bfloat16, {array.shape[1:]})))"
        )
