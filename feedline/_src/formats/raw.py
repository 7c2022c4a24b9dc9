"""Raw binary files: elements of one dtype, one after the other, as `ndarray.tofile` writes them."""

from __future__ import annotations

from typing import Any

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import FileArray, fields


def read(file: File, options: OpenOptions) -> list[Any]:
    """The array of a file; of a structured dtype a dict of its fields."""
    dtype: Any = options.dtype
    if dtype is None or file.size % dtype.itemsize:
        raise ValueError(
            f"{file.name} cannot be read as a .bin file of numbers: raw bytes do not say what they are, and must "
            f"be a multiple of their dtype, got dtype={dtype} and {file.size} bytes; pass open_source(path, "
            "dtype=...), or open the .idx of Megatron-LM beside them. If the dtype is right, it is truncated"
        )
    array = FileArray.of(file, dtype, (file.size // dtype.itemsize,), 0)
    return [options.named(fields(array), file.name)]


FORMAT = Format(
    "raw", (".bin",), takes=frozenset({"dtype", "window", "stride", "columns"}), way="mapped", open=read
)
