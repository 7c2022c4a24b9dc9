"""Raw binary files: elements of one dtype, one after the other, as `ndarray.tofile` writes them."""

from __future__ import annotations

from feedline._src.formats.registry import Format

FORMAT = Format("raw", (".bin",), takes=frozenset({"dtype", "window", "stride", "columns"}), way="mapped")
