"""`.npy`, `.npz` and raw binary files as arrays, mapped into memory wherever the format allows it."""

from __future__ import annotations

import ast
import contextlib
import io
import math
import mmap
import re
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src.files.opening import opening
from feedline._src.files.version import FileVersion
from feedline._src.formats.registry import Format
from feedline._src.formats.table import memory_bytes

FORMAT = Format("npy", (".npy", ".npz"), takes=frozenset({"columns", "window", "stride"}), way="mapped")

Array = npt.NDArray[Any]
_MAGIC = b"\x93NUMPY"
_ENCODINGS = {(1, 0): "latin1", (2, 0): "latin1", (3, 0): "utf8"}
MOST_HEADER_BYTES = 10_000
"""NumPy's limit: Python's parser is not safe for long untrusted texts."""
_NAMES = {"descr", "fortran_order", "shape"}
_AST = threading.RLock()
"""In Python 3.11, threads that use `ast` at the same time may get a SystemError (CPython issue 106905)."""
_ATTEMPTS = 9
"""Other modules use `ast` too."""


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

    @property
    def order(self) -> Literal["C", "F"]:
        """The order of the elements, in NumPy's notation."""
        return "F" if self.fortran else "C"


def read_header(read: Callable[[int], bytes], size: int) -> Header:
    """The header of a `.npy` of `size` bytes, whose next bytes come from `read`.

    Raises:
      ValueError: it is not a valid header, or describes more elements than fit into that many bytes.

    Example:
      >>> import io
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
    if start > MOST_HEADER_BYTES or start > size:
        raise ValueError(
            f"its header must have at most {MOST_HEADER_BYTES} bytes and end in the file, got {length} bytes"
        )
    found = _literal(read(length).decode(_ENCODINGS[version]))
    if not isinstance(found, dict) or found.keys() != _NAMES:
        raise ValueError(f"its header must be a dict of {', '.join(sorted(_NAMES))}, got {found!r:.200}")
    shape = found["shape"]
    if not isinstance(shape, tuple) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError(f"its shape must be a tuple of lengths, got {shape!r:.200}")
    if not isinstance(found["fortran_order"], bool):
        raise ValueError(f"fortran_order must be True or False, got {found['fortran_order']!r:.200}")
    dtype = _dtype(found["descr"])
    needed = start + math.prod(shape) * dtype.itemsize
    if needed > size:
        raise ValueError(f"its header promises {needed} bytes, but there are {size}")
    return Header(shape, dtype, found["fortran_order"], start)


def _literal(text: str) -> Any:
    try:
        return _evaluated(text)
    except Exception as error:  # of many types, for arbitrary text
        written = re.sub(r"(?<=\d)L(?=[,)])", "", text)  # (10L,) is how Python 2 wrote some lengths
        if written != text:
            return _literal(written)
        raise ValueError(f"its header is no Python literal ({type(error).__name__}: {error})") from error


def _evaluated(text: str) -> Any:
    with _AST:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(SystemError):
                return ast.literal_eval(text)
        return ast.literal_eval(text)


def _dtype(described: Any) -> np.dtype[Any]:
    try:
        dtype = np.lib.format.descr_to_dtype(described)
    except Exception as error:  # of many types, as above
        raise ValueError(f"its dtype {described!r:.200} is none that NumPy knows ({error})") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects (dtype object), which cannot be mapped or placed")
    if dtype.itemsize == 0:
        raise ValueError(f"its elements must have bytes, and those of dtype {described!r:.200} have none")
    return dtype


class Mapped(Protocol):
    """The bytes of a file or of an object in a store as memory, in which not all may be read at any time.

    Attributes:
      bytes: of which arrays may be views.
    """

    bytes: Any

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""


class MappedObject:
    """The memory of an object in a store.

    Args:
      memory: all of its bytes, which must not be read before they were fetched.
    """

    def __init__(self, memory: memoryview) -> None:
        self.bytes = memory

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""
        return np.ndarray(header.shape, header.dtype, self.bytes, offset + header.start, order=header.order)


class MappedFile:
    """All bytes of a file, read from disk when they are used. It keeps one file descriptor open.

    A file that is replaced or deleted stays mapped, with its old bytes. Writes to the file are visible in the
    mapping. An access beyond the end of a truncated file ends the process (SIGBUS), unless the gather in C makes
    it. So call `version.check_open` before other reads, and after each one.

    Args:
      opened: the file; it may be closed afterwards.

    Attributes:
      version: of the file that is mapped.
      bytes: read-only; arrays may be views of it.
    """

    def __init__(self, opened: BinaryIO) -> None:
        self.version = FileVersion.of_open(opened.fileno())
        if self.version.size_bytes == 0:
            self.bytes: mmap.mmap | bytes = b""  # nothing can be mapped
        else:
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""
        return np.ndarray(header.shape, header.dtype, self.bytes, offset + header.start, order=header.order)


def file_at(address: int) -> str | None:
    """The file that is mapped at an address; None if there is none, or the system does not tell."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
                if begin <= address < end:
                    return line[line.index("/") :].rstrip("\n") if "/" in line else None
    except OSError:
        pass
    return None


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a member: signature, the lengths of its name and extra field
_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1  # bit of the flags of a member
_CHUNK_BYTES = 1 << 20
_DEFLATE_RATIO = 1032
"""More bytes than this cannot come out of a byte: 258 of them need at least two bits."""


def read_members(file: Mapped, opened: BinaryIO) -> dict[str, Array]:
    """The arrays of a `.npz`, by name.

    Args:
      file: the mapped file.
      opened: the same file, open for reading.

    Raises:
      ValueError: it is damaged or encrypted, has no members or two of one name; the error names the member.
    """
    arrays: dict[str, Array] = {}
    with _archive(opened) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"its members must have different names, and two are called {name!r}")
            try:
                arrays[name] = _member(file, opened, archive, member)
            except Exception as error:  # of many types, from zipfile and the decompressors
                raise ValueError(f"its member {name!r}: {str(error)[:300] or type(error).__name__}") from error
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays


def _archive(opened: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(opened)
    except Exception as error:  # of many types, if its directory is damaged
        raise ValueError(f"it is no zip archive ({error or type(error).__name__})") from error


def _member(file: Mapped, opened: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.flag_bits & _ENCRYPTED:
        raise ValueError("it is encrypted; write it without a password")
    if member.compress_type == zipfile.ZIP_STORED:
        return _stored(file, opened, member)
    if member.compress_size > len(file.bytes):
        raise ValueError(f"it has {member.compress_size} compressed bytes, and the file has {len(file.bytes)}")
    most = memory_bytes()
    if member.compress_type == zipfile.ZIP_DEFLATED:
        most = min(most, _DEFLATE_RATIO * (member.compress_size + 1))
    if member.file_size > most:
        raise ValueError(
            f"its directory promises {member.file_size} bytes, and at most {most} can come out of the "
            f"{member.compress_size} that are stored, or fit into memory"
        )
    with archive.open(member) as stream:
        header = read_header(stream.read, member.file_size)
        array = np.empty(header.shape, header.dtype, header.order)
        filled = array.reshape(-1, order="A").view(np.uint8)
        at = 0
        while piece := stream.read(
            min(_CHUNK_BYTES, filled.nbytes - at) or 1
        ):  # a read at the end compares the checksum
            if at + len(piece) > filled.nbytes:
                break  # numpy.load ignores what follows, too
            filled[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
    if at < filled.nbytes:
        raise ValueError(f"its header promises {filled.nbytes} bytes of elements, and there are {at}")
    return array


def _stored(file: Mapped, opened: BinaryIO, member: zipfile.ZipInfo) -> Array:
    """A member that is not compressed: a view of the file."""
    opened.seek(member.header_offset)
    local = opened.read(_LOCAL_HEADER.size)
    start = member.header_offset + _LOCAL_HEADER.size
    if len(local) < _LOCAL_HEADER.size or not local.startswith(_SIGNATURE):
        raise ValueError("the archive's directory leads to a place where no member is")
    _, name, extra = _LOCAL_HEADER.unpack(local)
    start += name + extra
    end = start + member.file_size
    if end > len(file.bytes):
        raise ValueError(f"it ends at byte {end}, and the file has {len(file.bytes)}")
    opened.seek(start)
    header = read_header(io.BytesIO(opened.read(min(end - start, MOST_HEADER_BYTES))).read, member.file_size)
    return file.array(header, start)


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
    """The arrays that `load` returns, of a file that is mapped and open. Raises what `load` does."""
    suffix = PurePosixPath(path).suffix
    try:
        if suffix == ".npz":
            arrays: Any = read_members(file, opened)
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
