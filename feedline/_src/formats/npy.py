"""`.npy` and `.npz` files: arrays that lie in them as they are, and compressed members, which are read whole."""

from __future__ import annotations

import io
import math
import struct
import threading
import zipfile
from collections.abc import Callable
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, suffix_of
from feedline._src.formats.table import FileArray, fields, memory_bytes

Array = npt.NDArray[Any]
_MAGIC = b"\x93NUMPY"
_ENCODINGS = {(1, 0): "latin1", (2, 0): "latin1", (3, 0): "utf8"}
HEADER_BYTES = 10_000
"""NumPy's limit: Python's parser is not safe for long untrusted texts."""
_AST = threading.Lock()
"""In Python 3.11, threads that use `ast` at the same time may get a SystemError (CPython issue 106905)."""


def read(file: File, options: OpenOptions) -> list[Any]:
    """The arrays of a file: one, or a dict by name. Records (a structured dtype) become a dict of their fields.

    Raises:
      ValueError: it is truncated, damaged, of another format, or holds Python objects.
      TypeError: its elements are bytes whose dtype `numpy.save` has lost.
    """
    suffix = suffix_of(file.name)
    try:
        if suffix == ".npz":
            with file.open() as opened:
                arrays = _members(file, opened)
        else:
            head = io.BytesIO(file.samples([(0, HEADER_BYTES)])[0])
            arrays = {"": read_header(head.read, file.size).array(file, 0)}
    except ValueError as error:
        writer = "numpy.savez" if suffix == ".npz" else "numpy.save"
        raise ValueError(
            f"{file.name} cannot be read as a {suffix} file of numbers: {error}. It may be truncated or "
            f"another format; write it again with {writer}"
        ) from error
    for name, array in arrays.items():
        _check_dtype(file.name, name, array)
    return [options.named(arrays if suffix == ".npz" else fields(arrays[""]), file.name)]


FORMAT = Format(
    "npy",
    (".npy", ".npz"),
    takes=frozenset({"columns", "window", "stride"}),
    way="mapped",
    open=read,
    head_bytes=HEADER_BYTES,
)


class Header(NamedTuple):
    """The header of a `.npy`.

    Attributes:
      shape, dtype: of the array.
      fortran: elements are in Fortran order, else in C order.
      start: the size of the header in bytes, after which the elements follow.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    def array(self, file: File, at: int) -> FileArray:
        """The array of a `.npy` at byte `at` of a file."""
        return FileArray.of(file, self.dtype, self.shape, at + self.start, self.fortran)


def read_header(read: Callable[[int], bytes], size: int) -> Header:
    """The header of a `.npy` of `size` bytes, whose next bytes come from `read`.

    Raises:
      ValueError: it is not a valid header, or describes more elements than fit into that many bytes.

    Example:
      >>> file = io.BytesIO()
      >>> np.save(file, np.zeros((2, 3), np.int16))
      >>> file.seek(0)
      0
      >>> read_header(file.read, 140)
      Header(shape=(2, 3), dtype=dtype('int16'), fortran=False, start=128)
    """
    first = read(len(_MAGIC) + 2)
    if first[:-2] != _MAGIC:
        raise ValueError("it does not begin as a .npy does")
    version = (first[-2], first[-1])
    if version not in _ENCODINGS:
        raise ValueError(f"its format version must be 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}")
    prefix = 2 if version == (1, 0) else 4
    length = int.from_bytes(read(prefix), "little")
    start = len(first) + prefix + length
    if start > HEADER_BYTES or start > size:
        raise ValueError(
            f"its header must have at most {HEADER_BYTES} bytes and end in the file, got {length} bytes"
        )
    try:
        # NumPy reads 3.0 only together with its elements: here all versions become 2.0 of ASCII
        text = read(length).decode(_ENCODINGS[version]).encode("ascii", "backslashreplace")
        file = io.BytesIO(struct.pack("<I", len(text)) + text)
        with _AST:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file, max_header_size=len(text))
    except Exception as error:  # of many types, for arbitrary text
        raise ValueError(f"NumPy cannot read its header ({type(error).__name__}: {error})") from error
    if not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError(f"its shape must be a tuple of lengths, got {shape!r:.200}")
    if dtype.hasobject:
        raise ValueError("it holds Python objects (dtype object), which cannot be mapped or placed")
    if dtype.itemsize == 0:
        raise ValueError(f"its elements must have bytes, and those of dtype {dtype!r:.200} have none")
    needed = start + math.prod(shape) * dtype.itemsize
    if needed > size:
        raise ValueError(f"its header promises {needed} bytes, but there are {size}")
    np.broadcast_to(np.empty((), dtype), shape)  # refuses more axes than an array can have
    return Header(shape, dtype, fortran, start)


_CHUNK_BYTES = 1 << 20
_DEFLATE_RATIO = 1032
"""More bytes than this cannot come out of a byte: 258 of them need at least two bits."""


def _members(file: File, opened: BinaryIO) -> dict[str, Any]:
    """The arrays of a `.npz`, by name.

    Raises:
      ValueError: it is damaged or encrypted, has no members or two of one name; the error names the member.
    """
    arrays: dict[str, Any] = {}
    try:
        archive = zipfile.ZipFile(opened)
    except Exception as error:  # of many types, if its directory is damaged
        raise ValueError(f"it is no zip archive ({error or type(error).__name__})") from error
    with archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"its members must have different names, and two are called {name!r}")
            try:
                _check_sizes(file, member)
                with archive.open(member) as stream:
                    if member.compress_type == zipfile.ZIP_STORED:
                        start = opened.tell()  # zipfile has read what is before the member's data
                        arrays[name] = read_header(opened.read, member.file_size).array(file, start)
                    else:
                        arrays[name] = _decompressed(stream, member.file_size)
            except Exception as error:  # of many types, from zipfile and the decompressors
                raise ValueError(f"its member {name!r}: {str(error)[:300] or type(error).__name__}") from error
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays


def _check_sizes(file: File, member: zipfile.ZipInfo) -> None:
    """Refuse a member that promises more bytes than can come out of it, before memory is taken for them."""
    if member.compress_size > file.size:
        raise ValueError(f"it has {member.compress_size} bytes in the archive, and the file has {file.size}")
    most = memory_bytes()
    if member.compress_type == zipfile.ZIP_DEFLATED:
        most = min(most, _DEFLATE_RATIO * (member.compress_size + 1))
    if member.compress_type != zipfile.ZIP_STORED and member.file_size > most:
        raise ValueError(
            f"its directory promises {member.file_size} bytes, and at most {most} can come out of the "
            f"{member.compress_size} that are stored, or fit into memory"
        )


def _decompressed(stream: IO[bytes], size: int) -> Array:
    header = read_header(stream.read, size)
    array = np.empty(header.shape, header.dtype, "F" if header.fortran else "C")
    filled = array.reshape(-1, order="A").view(np.uint8)
    at = 0
    # a read at the end compares the checksum
    while piece := stream.read(min(_CHUNK_BYTES, filled.nbytes - at) or 1):
        if at + len(piece) > filled.nbytes:
            break  # numpy.load ignores what follows, too
        filled[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if at < filled.nbytes:
        raise ValueError(f"its header promises {filled.nbytes} bytes of elements, and there are {at}")
    return array


_LOST_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16"}  # the most common one of each size in bytes


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
