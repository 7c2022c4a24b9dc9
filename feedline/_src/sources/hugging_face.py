"""Opens datasets of Hugging Face's library `datasets`: its objects, and folders written by `Dataset.save_to_disk`.

If all columns are numbers, rows are arrays; if a column is bytes, text or files, rows are records.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np

from feedline._src.errors import RowError
from feedline._src.files.file import File
from feedline._src.files.files import Files
from feedline._src.files.folder import Folder, Names
from feedline._src.formats.arrow import END_OF_STREAM, column_of, is_a, is_bytes, leaf_of, pyarrow
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Library, require
from feedline._src.formats.table import Column, Grouped, Leaf, by_rows, described
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import EncodedSource, Source
from feedline._src.sources.arrays import CHECKS_A_READ
from feedline._src.sources.groups import open_groups

T = TypeVar("T")
_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_SAMPLED_ROWS = 64
compute: Any = Library("pyarrow.compute", "arrow")


# --- which objects and folders are datasets ---


class HuggingFaceDataset(Protocol):
    """The parts of a `datasets.Dataset` that are used: its Arrow table, its format, and its mapped files."""

    data: Any
    format: Mapping[str, Any]
    column_names: list[str]
    cache_files: list[dict[str, str]]


def is_dataset(value: Any) -> TypeGuard[HuggingFaceDataset]:
    """Whether a value is a `datasets.Dataset`. TypeError: it is a dict of datasets, or is streamed."""
    if _is(value, "DatasetDict") or _is(value, "IterableDatasetDict"):
        names = ", ".join(repr(name) for name in value)
        raise TypeError(
            f"a source is the dataset of one split, got a {type(value).__name__} with the splits {names}; pass "
            f"one of them, dataset[{next(iter(value), 'train')!r}], or load_dataset(..., split=...)"
        )
    if _is(value, "IterableDataset"):
        raise TypeError(
            "a source needs random access to its rows, and an IterableDataset returns them only in sequence; "
            "load the dataset without streaming=True, or pass it as a stream: docs/formats.md#streaming shows how"
        )
    return _is(value, "Dataset")


def _is(value: Any, name: str) -> bool:
    """Whether a value is an instance of the class `name` of `datasets`. False if `datasets` was not imported."""
    return isinstance(value, getattr(sys.modules.get("datasets"), name, ()))


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json"))


def check_no_cache(paths: Sequence[str]) -> None:
    """Raise ValueError if some, but not all, of these Arrow files are caches of `dataset.map` or `filter`.

    A cache lies beside the files of a dataset, and holds the rows that `map` or `filter` returned.
    """
    caches = [path for path in paths if _CACHED.fullmatch(os.path.basename(path))]
    if 0 < len(caches) < len(paths):
        raise ValueError(
            "Hugging Face's dataset.map, filter and shuffle keep caches beside the files of a dataset, and "
            f"{caches[0]} is such a cache; open the folder by its path: open_source({os.path.dirname(paths[0])!r})"
            "; or leave the cache out, by the glob data-*.arrow for example, or call open_source(dataset)"
        )


# --- opening ---


def open_dataset(dataset: HuggingFaceDataset | str, options: OpenOptions) -> Source | EncodedSource:
    """Open a dataset or a saved folder. Rows are encoded if a chosen column has bytes, text or files.

    Raises:
      ValueError: an option other than columns is given; the dataset has no rows; or it has damaged files, lists of
        different lengths, a transform, or a format that converts values.
      TypeError: a column holds neither numbers nor bytes.
      ImportError: it is a folder, and `datasets` is not installed.
    """
    if others := options.given() - {"columns"}:
        names = ", ".join(sorted(others))
        raise ValueError(f"a dataset of Hugging Face takes only the option columns, got {names}; leave it out")
    loaded = _loaded(dataset) if isinstance(dataset, str) else dataset
    return open_groups(DatasetFiles.grouped, DatasetFiles(loaded, options), options)


def _loaded(folder: str) -> HuggingFaceDataset:
    """The dataset in a folder for which `is_saved` is true."""
    library = require("datasets", "datasets")
    try:
        dataset: HuggingFaceDataset = library.Dataset.load_from_disk(os.path.abspath(folder), keep_in_memory=False)
        for file in Files([file["filename"] for file in dataset.cache_files]):
            # pyarrow accepts a stream that was truncated between two record batches
            if file.samples([(max(0, file.size - len(END_OF_STREAM)), len(END_OF_STREAM))]) != [END_OF_STREAM]:
                raise ValueError(f"{file.name} is truncated")
    except FileNotFoundError:
        raise
    except Exception as error:  # of many types, for damaged files
        raise ValueError(
            f"{folder} cannot be read as a folder of Dataset.save_to_disk: {error or type(error).__name__}; save "
            "the dataset again"
        ) from error
    return dataset


# --- columns ---


def _plain_table(dataset: HuggingFaceDataset, options: OpenOptions, files: Files) -> Any:
    """The chosen columns as a `pyarrow.Table`, in types that `column_of` accepts. Shares the dataset's memory."""
    table = dataset.data.table.select(options.chosen(_columns_of(dataset), "this dataset"))
    if table.num_rows == 0:
        raise ValueError("a source must have at least one row, and this dataset has none")
    try:
        table.validate()  # checks sizes of buffers, since damaged files could crash the process
    except ValueError as error:
        where = f", in {', '.join(files.paths[:3])}" if files else ""
        raise ValueError(
            f"the table of this dataset is damaged{where}: {error}; make the dataset again"
        ) from error
    return pyarrow.table({name: _plain(table.column(name), name) for name in table.column_names})


def _columns_of(dataset: HuggingFaceDataset) -> Sequence[str]:
    """The columns that a dataset's format chooses. ValueError: the format converts the values of the table."""
    form = dataset.format
    if form["type"] == "custom" or form["format_kwargs"]:
        raise ValueError(
            "open_source reads the values that are stored, and this dataset has a transform (with_transform), or "
            f"a format that converts them ({dict(form['format_kwargs'] or {})}); pass the dataset itself to the "
            "feed, which reads converted rows one by one; or remove both with dataset.with_format(None), and use "
            "feedline.decoded, Feed(transform=...) or dataset.cast_column"
        )
    chosen: Sequence[str] = dataset.data.table.column_names if form["output_all_columns"] else form["columns"]
    if not chosen:
        raise ValueError("a source must have at least one column, and this dataset has none")
    return chosen


def _plain(column: Any, name: str) -> Any:
    """Cast a column so that its lists have a type of fixed size.

    Lists of any type can be cast if all have the same length, like the lists of `datasets.Array2D` and padded
    tokens.
    """
    with_values = (chunk for chunk in column.chunks if len(chunk) > chunk.null_count)
    kind = _of_one_shape(column.type, next(with_values, column.chunk(0)))
    if _leaf_of(kind) is None:
        raise TypeError(
            f"column {name!r} must have rows that are numbers, bytes or text, or lists of numbers, got "
            f"{column.type}; make numbers of it with dataset.cast_column, dataset.flatten or dataset.map, as the "
            "table in docs/formats.md#hugging-face-datasets says, or leave the column out with columns=[...]"
        )
    try:
        return column.cast(kind)  # no copy, unless lists are null
    except ValueError as error:
        raise ValueError(
            f"column {name!r} must have lists of one length, and some differ from the first list, {kind}; pad "
            "them with dataset.map, or read them by their offsets with feedline.Ragged (docs/formats.md). If the "
            "rows of this dataset were selected from a larger one, copy them with dataset.flatten_indices(). "
            "columns=[...] leaves the column out"
        ) from error


def _of_one_shape(kind: Any, rows: Any) -> Any:
    """The type `kind` without extension types, its lists of the fixed sizes in the first row that is not null."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _of_one_shape(kind.storage_type, rows.storage)
    if not is_a(kind, "list", "large_list", "fixed_size_list"):
        return kind
    values = rows.slice(max(0, compute.index(rows.is_valid(), True).as_py()), 1).flatten()
    length = kind.list_size if is_a(kind, "fixed_size_list") else len(values)
    return pyarrow.list_(_of_one_shape(kind.value_type, values), length)


def _is_file(kind: Any) -> bool:
    """Whether `kind` is the Arrow type of `datasets.Image`, `Audio` and the like: a struct of bytes and path."""
    fields = {field.name: field.type for field in kind} if is_a(kind, "struct") else {}
    return fields.keys() == {"bytes", "path"} and all(map(is_bytes, fields.values()))


class _FileColumn:
    """A column of files. Some rows hold the bytes of their file, other rows the path of their file.

    Attributes:
      null: bool[k], True for rows that have neither bytes nor path; None if there are no such rows.
    """

    def __init__(self, data: Column, paths: Column) -> None:
        assert data.null is not None
        self._data, self._is_outside = data, data.null
        self.null = None if paths.null is None else data.null & paths.null
        self._outside = Folder("", Names(paths.take(np.arange(paths.rows))), {})

    def take(self, rows: Indices) -> list[bytes]:
        """The bytes of these rows' files. OSError: there is no file at a path. FeedError: a file has changed."""
        found: list[Any] = self._data.take(rows)
        for at in np.flatnonzero(self._is_outside[rows]).tolist():
            row = int(rows[at])
            path = os.path.join(self._outside.place, self._outside.path_of(row))
            if not os.path.isfile(path):  # reading a pipe would wait
                raise FileNotFoundError(
                    f"files of a dataset must lie in it or at local paths, and there is none at {path!r}; put the "
                    "file back, or store all in the dataset with dataset.save_to_disk(folder), and open the folder"
                )
            try:
                (found[at],) = self._outside.read([row])
            except RowError as error:  # drops the row number, which is not one of the dataset
                raise OSError(error.message) from error
        return found


def _leaf_of(kind: Any) -> Leaf | None:
    return "bytes" if _is_file(kind) else leaf_of(kind)


def _column_of(array: Any) -> Column | _FileColumn:
    if not _is_file(array.type):
        return column_of(array)
    data, paths = (column_of(compute.struct_field(array, field)) for field in ("bytes", "path"))
    return data if data.null is None else _FileColumn(data, paths)


# --- rows ---


class DatasetFiles:
    """A dataset with the methods of a `Files` of one file, so that `open_groups` opens it like any other format.

    Iterating over it gives the files that the dataset maps; a dataset in memory has none.

    Args:
      mapped: the mapped files with their expected versions; None: the dataset's files with their current versions.
    """

    in_store = False
    paths = ("datasets.Dataset",)

    def __init__(self, dataset: HuggingFaceDataset, options: OpenOptions, mapped: Files | None = None) -> None:
        self._dataset, self._options = dataset, options
        self._mapped = mapped or Files([file["filename"] for file in dataset.cache_files])
        self._to_check = itertools.cycle(list(self._mapped))  # a cycle over a list can be shared by threads
        table = _plain_table(dataset, options, self._mapped)
        self._spec: dict[str, Any] = {field.name: _leaf_of(field.type) for field in table.schema}
        self._names = sorted(self._spec)  # the order in which JAX numbers the leaves of a dict
        batches = table.to_batches()
        self._pieces = [{name: _column_of(batch.column(name)) for name in self._names} for batch in batches]
        self._piece_of_row = Shards([batch.num_rows for batch in batches])
        indices: Any = dataset._indices  # type: ignore[attr-defined]  # there is no public attribute
        self.selected: Indices | None = None
        if indices is not None:
            self.selected = np.asarray(indices.table.column(0).to_numpy(), np.uint64).view(np.int64)
        self._count = table.num_rows if self.selected is None else len(self.selected)

    def grouped(self, options: OpenOptions) -> Grouped:
        """Describe the dataset as arrays if all columns are numbers without nulls, else as rows read by number."""
        nulls = {leaf: self._nulls_of(name) for leaf, name in enumerate(self._names)}
        has_bytes = any(isinstance(leaf, str) for leaf in self._spec.values())
        return by_rows(
            self._spec,
            self._count,
            self.read_rows,
            nulls=nulls,
            arrays=None if has_bytes or any(nulls.values()) or not self._count else self._arrays,
            instead=", or leave columns of bytes and text out with open_source(dataset, columns=[...])",
        )

    def _nulls_of(self, name: str) -> int:
        null = np.zeros(len(self._piece_of_row), np.bool_)
        for piece, first in zip(self._pieces, self._piece_of_row.firsts, strict=True):
            if (here := piece[name].null) is not None:
                null[first : first + len(here)] = here
        return int((null if self.selected is None else null[self.selected]).sum())

    def _arrays(self) -> list[Any]:
        """The columns of each record batch. `ArraySource` applies `selected`."""
        pieces: Any = self._pieces
        return [{name: column.values for name, column in piece.items()} for piece in pieces]

    def read_rows(self, leaves: Sequence[int], rows: Indices) -> list[Any]:
        """See `Grouped`. ValueError, OSError: a row cannot be read or has a null."""
        names = [self._names[leaf] for leaf in leaves]
        found = [_room_for(self._spec[name], len(rows)) for name in names]
        in_table = rows if self.selected is None else self.selected[rows]
        for piece, local, here in self._piece_of_row.split(in_table):
            for name, values in zip(names, found, strict=True):
                column = self._pieces[piece][name]
                if column.null is not None and column.null[local].any():
                    raise ValueError(
                        f"every column of a row must have a value, and {name!r} is null in this row; leave out "
                        "such rows with dataset.filter(lambda value: value is not None, "
                        f"input_columns=[{name!r}]), or the column with columns=[...]"
                    )
                values[here] = column.take(local)
        return found

    @property
    def digests(self) -> list[Any]:
        """The number of rows, their columns, and a digest of some rows: nothing that depends on a path or a time.

        The fingerprint of `datasets` depends on file times, so it differs between machines.
        """
        hashed = hashlib.sha256()
        for row in digests.sampled(self._count, _SAMPLED_ROWS):
            try:
                values = self.read_rows(range(len(self._names)), np.array([row]))
            except (ValueError, OSError):  # if a row is bad in some processes only, their fingerprints differ
                values = [[b"a bad row"]]
            for (value,) in values:
                data = value if isinstance(value, bytes) else value.tobytes()
                hashed.update(b"%d " % len(data) + data[: digests.SAMPLED_BYTES])
        columns = {name: described(self._spec[name]) for name in self._names}
        return [[self._count, columns, hashed.hexdigest()[:32]]]

    # --- as `Files` ---

    def __iter__(self) -> Iterator[File]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> DatasetFiles:
        return self

    def opened(self, number: int, open_file: Callable[[DatasetFiles], T]) -> T:
        return open_file(self)

    def check(self) -> None:
        """Raise a FeedError if one of the next few mapped files was written to."""
        for file in itertools.islice(self._to_check, min(CHECKS_A_READ, len(self._mapped))):
            file.check_open()

    def close(self) -> None:
        """No-op: the files are unmapped with the dataset."""

    def __reduce__(self) -> Any:
        return _unpickled, (self._mapped, pickle.dumps(self._dataset), self._options)


def _unpickled(mapped: Files, dataset: bytes, options: OpenOptions) -> DatasetFiles:
    """Load a dataset that another process pickled. Unpickling `mapped` has compared the versions of its files."""
    return DatasetFiles(pickle.loads(dataset), options, mapped)


def _room_for(leaf: Leaf, rows: int) -> Any:
    return np.empty(rows, object) if isinstance(leaf, str) else np.empty((rows, *leaf.shape), leaf.dtype)
