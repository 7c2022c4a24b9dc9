"""A file, or an object in a store, as pyarrow reads it, and its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from feedline._src.formats import extras
from feedline._src.rows import digests
from feedline._src.stores.remote_object import RemoteObject, open_object


def readable(path: Path | RemoteObject) -> Any:
    """What pyarrow reads a file or an object from."""
    if isinstance(path, Path):
        return str(path)
    return extras.require("pyarrow", "parquet").PythonFile(open_object(path), mode="r")


def digest_of(path: Path | RemoteObject) -> list[Any]:
    """JSON values that identify the contents of a file or an object: its size and sampled bytes."""
    if isinstance(path, Path):
        return digests.of_file(path)
    return digests.of_samples(path.size, path.samples(digests.samples_of_file(path.size)))
