"""ArrayRecord files, which Grain's datasets lie in."""

from __future__ import annotations

from feedline._src.formats.registry import Format

FORMAT = Format(
    "array_record",
    (".array_record", ".arrayrecord"),
    takes=frozenset({"dtype", "decode", "columns"}),
    extra="array-record",
    way="records",
)
