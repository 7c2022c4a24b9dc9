"""Zarr arrays on a local disk as groups of rows: a row of chunks is read at once, by TensorStore."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline.loader import digests, extras
from feedline.loader.declared import Declared
from feedline.loader.groups import GroupedFile
from feedline.loader.spec import is_numeric

Array = npt.NDArray[Any]
_MARKS = ("zarr.json", ".zarray", ".zgroup")


def is_zarr(path: Path) -> bool:
    """Whether a directory is a Zarr array or group, of version 2 or 3."""
    return any((path / mark).is_file() for mark in _MARKS)


def grouped(path: Path, declared: Declared) -> GroupedFile:
    """The chunks of an array, or of the arrays of a group as a dict, along their first axis.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
    """
    if not is_zarr(path):
        raise FileNotFoundError(
            f"{path} is no Zarr array or group: it has none of {', '.join(_MARKS)}; check the path"
        )
    tree = declared.named(_stores(path), str(path))
    stores = jax.tree_util.tree_leaves(tree)
    if not stores:
        raise ValueError(f"a Zarr group must have at least one array, {path} has none")
    heights = [max(1, store.chunk_layout.read_chunk.shape[0]) for store in stores]

    def read(leaf: int, group: int) -> Array:
        start = group * heights[leaf]
        stop = min(start + heights[leaf], stores[leaf].shape[0])
        return np.ascontiguousarray(_result(stores[leaf][start:stop].read()))

    return GroupedFile(
        jax.tree.map(lambda store: jax.ShapeDtypeStruct(store.shape[1:], store.dtype.numpy_dtype), tree),
        [_lengths(store.shape[0], height) for store, height in zip(stores, heights, strict=True)],
        read,
        functools.partial(_identity, stores),
    )


def _lengths(rows: int, height: int) -> list[int]:
    return [min(height, rows - start) for start in range(0, rows, height)]


def _stores(path: Path) -> Any:
    """The TensorStore of an array, or a dict of those of a group; groups may lie in groups."""
    if _is_array(path):
        return _store(path)
    members = sorted(child for child in path.iterdir() if child.is_dir() and is_zarr(child))
    return {member.name: _stores(member) for member in members}


def _is_array(path: Path) -> bool:
    if not (path / "zarr.json").is_file():
        return (path / ".zarray").is_file()
    try:
        return bool(json.loads((path / "zarr.json").read_text())["node_type"] == "array")
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path / 'zarr.json'} cannot be read as the metadata of Zarr: {error}; write it again"
        ) from error


def _store(path: Path) -> Any:
    driver = "zarr3" if (path / "zarr.json").is_file() else "zarr"
    tensorstore = extras.need("tensorstore", "zarr")
    try:
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path.absolute()}/"}}
        store = tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a Zarr array: {error}; write it again") from error
    if store.rank == 0:
        raise ValueError(f"{path}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(store.dtype.numpy_dtype):
        raise TypeError(
            f"{path}: an accelerator holds numbers and booleans, got dtype {store.dtype.name}; encode it as "
            "numbers first, or leave it out with columns=[...]"
        )
    return store


def _identity(stores: list[Any]) -> list[Any]:
    """Of each array: dtype, shape, and a digest of rows from its start to its end."""
    return [digests.of_rows(s.dtype.numpy_dtype, s.shape, functools.partial(_row, s)) for s in stores]


def _row(store: Any, row: int) -> Any:
    return _result(store[row].read())


def _result(future: Any) -> Any:
    """What a TensorStore future gives, waited for in Python.

    A wait inside TensorStore aborts the process when the interpreter ends meanwhile ("terminate called without an
    active exception"): CPython then ends the waiting thread in C++ code that does not let it.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
