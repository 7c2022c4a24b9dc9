"""Raw binary files: elements of one dtype, one after the other, as `ndarray.tofile` writes them."""

from __future__ import annotations

from typing import Any

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import FileArray, fields


def read(file: File, options: OpenOptions) -> list[Any]:
    """The array of a file; of a structured dtype a dict of its fields.

    Raises:
      ValueError: no dtype is given, or the size of the file is no multiple of it.
    """
    dtype: Any = options.dtype
    found = None
    if dtype is None:
        found = (
            "raw bytes do not say what they are; pass their dtype: feedline.open_source(path, dtype=...), or open "
            "the .idx of Megatron-LM beside them"
        )
    elif file.size % dtype.itemsize:
        found = f"it has {file.size} bytes, no multiple of the {dtype.itemsize} that one {dtype} takes"
    if found is not None:
        raise ValueError(
            f"{file.name} cannot be read as a .bin file of numbers: {found}. It may be truncated or another "
            "format; write it again with ndarray.tofile"
        )
    array = FileArray.of(file, dtype, (file.size // dtype.itemsize,), 0)
    return [options.named(fields(array), file.name)]


FORMAT = Format(
    "raw", (".bin",), takes=frozenset({"dtype", "window", "stride", "columns"}), way="mapped", open=read
)
