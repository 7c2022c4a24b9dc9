"""Reader of `.npz` files: zip archives of `.npy` members, which are mapped unless they are compressed."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from feedline._src.sources.formats.grouped_file import memory_bytes
from feedline._src.sources.formats.mapped_file import Mapped
from feedline._src.sources.formats.npy import MOST_HEADER_BYTES, read_header

Array = npt.NDArray[Any]
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
