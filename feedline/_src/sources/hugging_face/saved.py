"""Folders that `Dataset.save_to_disk` of the library `datasets` wrote, read without that library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feedline._src.files.opening import opening
from feedline._src.formats import extras
from feedline._src.formats.arrow import REWRITE, batches_of
from feedline._src.formats.arrow_columns import naming_file
from feedline._src.stores.urls import is_url

STATE = "state.json"
_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_INDICES = ("_indices_files", "_indices_data_files")
"""Keys under which versions of `datasets` before 2 name the files that select rows; later ones copy the rows."""


class _Table(NamedTuple):
    table: Any


class SavedDataset:
    """A saved folder as a `HuggingFaceDataset`. It pickles as its path.

    Args:
      folder: for which `is_saved` is true.

    Raises:
      ValueError: `state.json` or a file that it names is damaged.
      FileNotFoundError: there is no such file.
    """

    def __init__(self, folder: str) -> None:
        state = _state_of(folder)
        assert state is not None
        self._folder = folder
        paths = _files_in(folder, state, "_data_files")
        indices = [path for key in _INDICES for path in _files_in(folder, state, key)]
        self.cache_files = [{"filename": path} for path in [*paths, *indices]]
        self.data = _Table(_joined(paths))
        self._indices = _Table(_joined(indices)) if indices else None
        self.column_names: list[str] = self.data.table.column_names
        self.format: Mapping[str, Any] = {
            "type": state.get("_format_type"),
            "format_kwargs": state.get("_format_kwargs"),
            "columns": state.get("_format_columns") or self.column_names,
            "output_all_columns": state.get("_output_all_columns"),
        }

    def __reduce__(self) -> Any:
        return SavedDataset, (self._folder,)


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return _state_of(folder) is not None


def check_no_cache(paths: Sequence[str]) -> None:
    """Refuse Arrow files that are not all rows of one dataset, or not in the order of their rows.

    `dataset.map` and `filter` write the rows that they return beside the files of the dataset.

    Raises:
      ValueError: files of a dataset together with those of a cache, or rows that a file of indices selects.
    """
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
    for folder, names in by_folder.items():
        state = None if is_url(folder) else _state_of(folder)
        if state is None:
            others = [name for name in names if _CACHED.fullmatch(name)]
            fix = "leave it out, by the glob data-*.arrow for example, or pass the dataset: open_source(dataset)"
        else:
            rows = {os.path.basename(path) for path in _files_in(folder, state, "_data_files")}
            others = [name for name in names if name not in rows]
            fix = f"open the folder by its path: open_source({folder or '.'!r})"
        if others and len(others) < len(names):
            raise ValueError(
                "dataset.map, filter and shuffle of Hugging Face cache results beside the files of a dataset, and "
                f"{os.path.join(folder, others[0])} is such a cache; {fix}"
            )
        if state is not None and len(others) < len(names) and any(state.get(key) for key in _INDICES):
            raise ValueError(
                f"rows of this dataset are those that a file of indices selects from {paths[0]}; {fix}"
            )


def _state_of(folder: str) -> Mapping[str, Any] | None:
    """What `save_to_disk` wrote about a folder; None: it did not write it."""
    try:
        state = json.loads(Path(folder, STATE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) and "_data_files" in state else None


def _files_in(folder: str, state: Mapping[str, Any], key: str) -> list[str]:
    """The paths of the files that a state names."""
    try:
        names = [str(each["filename"]) for each in state.get(key) or ()]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{folder}/{STATE} must name files under {key!r}, got {state[key]!r}; save the dataset again"
        ) from error
    outside = next((name for name in names if os.path.basename(name) != name), None)
    if outside is not None:
        raise ValueError(
            f"{folder}/{STATE} must name files of its folder, got {outside!r}; save the dataset again"
        )
    return [os.path.join(folder, name) for name in names]


def _joined(paths: Sequence[str]) -> Any:
    """The rows of some files, one after the other, as a `pyarrow.Table` of mapped memory."""
    pyarrow = extras.require("pyarrow", "arrow")
    tables = []
    for path in paths:
        with naming_file(Path(path), "an Arrow file", REWRITE), opening(Path(path)) as file:
            schema, batches = batches_of(np.asarray(np.memmap(file, np.uint8, "r")))
            tables.append(pyarrow.Table.from_batches(list(batches), schema))
    if not tables:
        raise ValueError("a source must have at least one row, and this dataset has no files")
    return pyarrow.concat_tables(tables)
