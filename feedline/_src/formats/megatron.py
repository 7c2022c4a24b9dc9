"""Tokens of Megatron-LM and NeMo: a `.bin` of tokens, and the `.idx` beside it, which says where documents begin.

Megatron-LM's `IndexedDatasetBuilder` writes an `.idx`. It holds, in little-endian: nine magic bytes; uint64, the
version 1; uint8, the code of the dtype; uint64, the number n of sequences; uint64, the number d of document
indices; int32[n], the length of each sequence; int64[n], its offset in the `.bin` in bytes; int64[d], the number
of each document's first sequence, then n. In multimodal files, int8[n] follows, which is not read.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.registry import Format

FORMAT = Format("megatron", (".idx",), takes=frozenset({"window", "stride", "columns"}), way="mapped")

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
"""The dtype with code i is _DTYPES[i - 1]."""


class Index(NamedTuple):
    """The contents of an `.idx`.

    Attributes:
      dtype: the dtype of a token.
      offsets: int64[documents + 1]; document i is tokens offsets[i] … offsets[i + 1] − 1 of the `.bin`.
    """

    dtype: np.dtype[Any]
    offsets: npt.NDArray[np.int64]


def tokens_beside(index: str) -> str:
    """The path of the `.bin` that belongs to an `.idx`."""
    return f"{index.removesuffix('.idx')}.bin"


def read_index(file: File) -> Index:
    """Read an `.idx`. ValueError: it is damaged, or its sequences do not follow each other in the `.bin`."""

    def check(holds: Any, rule: str) -> None:
        if not holds:
            raise ValueError(
                f"{file.name} cannot be read as an .idx of Megatron-LM: {rule}. It may be truncated, or in "
                "another format; write it again with IndexedDatasetBuilder"
            )

    head = file.samples([(0, _HEADER.size)])[0]
    check(len(head) == _HEADER.size and head.startswith(_MAGIC), "it does not begin with the bytes of an .idx")
    _, version, code, sequences, marks = _HEADER.unpack(head)
    known = version == 1 and 1 <= code <= len(_DTYPES)
    check(known, f"its version must be 1 and the code of its dtype 1 to 8, got {version} and {code}")
    needed = _HEADER.size + 12 * sequences + 8 * marks
    fits = file.size in (needed, needed + sequences)
    check(fits, f"its header promises {needed} bytes, or {sequences} more, but there are {file.size}")
    dtype = np.dtype(_DTYPES[code - 1]).newbyteorder("<")
    sizes = np.array([4 * sequences, 8 * sequences, 8 * marks])
    lengths, places, firsts = file.read(_HEADER.size + np.cumsum(sizes) - sizes, sizes)
    ends = np.zeros(sequences + 1, np.int64)
    np.cumsum(np.frombuffer(lengths, "<i4"), out=ends[1:])
    follow = (np.diff(ends) >= 0).all() and (np.frombuffer(places, "<i8") == ends[:-1] * dtype.itemsize).all()
    check(follow, "its sequences must follow each other in the .bin, and do not")
    first = np.frombuffer(firsts, "<i8")
    ascend = len(first) and first[0] == 0 and first[-1] == sequences and (np.diff(first) >= 0).all()
    check(ascend, f"its document indices must ascend from 0 to {sequences}, its number of sequences, and do not")
    return Index(dtype, ends[first])


def check_tokens(index: Index, name: str, size: int) -> None:
    """Raise ValueError if a `.bin` of `size` bytes does not fit its `.idx`."""
    needed = int(index.offsets[-1]) * index.dtype.itemsize
    if size != needed:
        raise ValueError(
            f"{name} must have the {needed} bytes that {name.removesuffix('.bin')}.idx describes, and has "
            f"{size}; one of the two is truncated, or they belong to different corpora"
        )
