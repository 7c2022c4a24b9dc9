"""Datasets of Hugging Face's library `datasets`, which is never imported here: their Arrow table and its columns.

A dataset is an object of that library, or a folder that `Dataset.save_to_disk` wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.file import File, Indices, absolute
from feedline._src.files.files import Files
from feedline._src.files.store import is_url
from feedline._src.formats.arrow import (
    REWRITE,
    batches_of,
    column_of,
    is_a,
    is_bytes,
    naming_file,
    pyarrow,
    row_of,
)
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import Column
from feedline._src.rows import digests

STATE = "state.json"
_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_INDICES = ("_indices_files", "_indices_data_files")
"""Keys under which versions of `datasets` before 2 name the files that select rows; later ones copy the rows."""
_LISTS = ("list", "large_list", "fixed_size_list")
_CHECKS_A_READ = 4  # files, at some 5 µs each
_SAMPLED_ROWS = 64


class HuggingFaceDataset(Protocol):
    """What a `datasets.Dataset` has: the Arrow table, what `set_format` has set, and the files that are mapped."""

    data: Any
    format: Mapping[str, Any]
    column_names: list[str]
    cache_files: list[dict[str, str]]


def is_dataset(value: Any) -> TypeGuard[HuggingFaceDataset]:
    """Whether it is a `datasets.Dataset`."""
    if _is(value, "dataset_dict", "DatasetDict") or _is(value, "dataset_dict", "IterableDatasetDict"):
        names = ", ".join(repr(name) for name in value)
        raise TypeError(
            f"a source is the dataset of one split, got a {type(value).__name__} with the splits {names}; pass "
            f"one of them, dataset[{next(iter(value), 'train')!r}], or load_dataset(..., split=...)"
        )
    if _is(value, "iterable_dataset", "IterableDataset"):
        raise TypeError(
            "rows of a source have random access, and those of an IterableDataset only come one after the other; "
            "load the dataset without streaming=True, or pass it as a stream: docs/hugging_face.md#streaming "
            "has the class"
        )
    return _is(value, "arrow_dataset", "Dataset")


def _is(value: Any, module: str, name: str) -> bool:
    """Whether it is an object of this class of `datasets`, which can only be so if that library was imported."""
    found = sys.modules.get(f"datasets.{module}")
    kind = getattr(found, name, None)  # None also while another thread imports that library
    return kind is not None and isinstance(value, kind)


class OpenDataset:
    """The chosen columns of a dataset, and where its rows lie in them. Pickles as the dataset does: by its files.

    Args:
      dataset: of one split, or the path of a folder for which `is_saved` is true.
      files: into which the dataset is mapped, of the expected versions; None: the present ones.
      folder: from which relative paths in rows lead; None: the working directory.

    Attributes:
      table: a `pyarrow.Table` of the chosen columns.
      rows: for each of the `count` rows its row in the table; None: they are the same.
      files: empty for a dataset in memory.
    """

    def __init__(
        self,
        dataset: HuggingFaceDataset | str,
        options: OpenOptions,
        files: Files | None = None,
        folder: str | None = None,
    ) -> None:
        self._given, self._options = absolute(dataset) if isinstance(dataset, str) else dataset, options
        self.folder = folder or os.getcwd()
        if isinstance(dataset, str):
            self.files, table, indices, form = _loaded(dataset, files)
        else:
            self.files = files or Files([file["filename"] for file in dataset.cache_files])
            selected: Any = dataset._indices  # type: ignore[attr-defined]  # no public attribute has them
            table, indices, form = dataset.data.table, selected and selected.table, dataset.format
        names = _columns_of(form, table.column_names)
        self._to_check = itertools.cycle(list(self.files))  # of a list: threads share this iterator
        self.table = table.select(options.chosen(names, "this dataset"))
        try:
            self.table.validate()  # sizes of buffers: damaged files could end the process else
        except ValueError as error:
            where = f", in {', '.join(self.files.paths[:3])}" if self.files else ""
            raise ValueError(
                f"the table of this dataset is damaged{where}: {error}; make the dataset again"
            ) from error
        self.rows: Indices | None = None
        if indices is not None:
            self.rows = np.asarray(indices.column(0).to_numpy(), np.uint64).view(np.int64)
        self.count: int = self.table.num_rows if self.rows is None else len(self.rows)
        if self.count == 0:
            raise ValueError("a source must have at least one row, and this dataset has none")

    @property
    def sampled_rows(self) -> Indices:
        """The rows of which an identity is made."""
        return np.array(digests.sampled(self.count, _SAMPLED_ROWS), np.int64)

    def rows_in_table(self, rows: Indices) -> Indices:
        """int64[k]: where these rows of the dataset lie in the table."""
        return rows if self.rows is None else self.rows[rows]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuse, with a FeedError, what is read in the block if a file was written to, also meanwhile.

        Only the next few of many files are checked each time, to stay cheap.
        """
        few = list(itertools.islice(self._to_check, min(_CHECKS_A_READ, len(self.files))))
        for file in few:
            file.check_open()
        try:
            yield
        except FeedError:
            few = list(self.files)  # a change explains it better
            raise
        finally:
            for file in few:
                file.check_open()

    def __reduce__(self) -> Any:
        return _opened_again, (self.files, pickle.dumps(self._given), self._options, self.folder)


def _opened_again(files: Files, dataset: bytes, options: OpenOptions, folder: str) -> OpenDataset:
    """A copy of a dataset that another process has open. `files` are compared before it is loaded."""
    return OpenDataset(pickle.loads(dataset), options, files, folder)


def _columns_of(form: Mapping[str, Any], names: Sequence[str]) -> Sequence[str]:
    """The columns of `names` that a format chooses. ValueError if it makes other values of those in the table."""
    if form["type"] == "custom" or form["format_kwargs"]:
        raise ValueError(
            "open_source reads the values that are stored, and this dataset has a transform (with_transform), or "
            f"a format that converts them ({dict(form['format_kwargs'] or {})}); pass the dataset itself to the "
            "feed, which then reads row by row and calls it; or remove it with dataset.with_format(None), and use "
            "feedline.decoded, Feed(transform=...) or dataset.cast_column"
        )
    chosen: Sequence[str] = names if form["output_all_columns"] else form["columns"]
    if not chosen:
        raise ValueError("a source must have at least one column, and this dataset has none")
    return chosen


# --- columns ---


class FileColumn(NamedTuple):
    """A column of files, each of them in the table or at a path: `datasets.Image`, `Audio` and their like.

    Attributes:
      data: the bytes; null where the file lies at a path.
      paths: null where there is none.
      null: bool[k], true where there is neither; None if there is no such row.
      folder: from which relative paths lead.
    """

    data: Column
    paths: Column
    null: Any
    folder: str

    @property
    def rows(self) -> int:
        """k."""
        return self.data.rows

    def path_of(self, row: int) -> str | None:
        """The path of a file that is not in the table; None: it is in the table."""
        if self.data.null is None or not self.data.null[row]:
            return None
        return os.path.join(self.folder, os.fsdecode(self.paths.take(np.array([row]))[0]))

    def take(self, rows: Indices) -> list[bytes]:
        """The bytes of these files. FeedError: there is no file at its path."""
        taken = self.data.take(rows)
        for i, path in enumerate(map(self.path_of, rows.tolist())):
            if path is None:
                continue
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError(f"{path} is no regular file")  # a pipe would be waited for
            try:
                taken[i] = Path(path).read_bytes()
            except FileNotFoundError:
                raise FeedError(
                    "a file of a dataset must lie in it or at its path, and there is none at this path; load the "
                    "dataset where its files are, and copy them into it: dataset.save_to_disk(folder)",
                    stage="read",
                    file=path,
                ) from None
        return taken


AnyColumn = Column | FileColumn


def is_encoded(kind: Any) -> bool:
    """Whether values of this `pyarrow.DataType` are bytes, text or files."""
    return is_bytes(kind) or _is_file(kind)


def _is_file(kind: Any) -> bool:
    """Whether it is the type of files by bytes or path."""
    fields = {field.name: field.type for field in kind} if is_a(kind, "struct") else {}
    return fields.keys() == {"bytes", "path"} and all(map(is_bytes, fields.values()))


def columns_of(table: Any, folder: str) -> list[dict[str, AnyColumn]]:
    """The columns of each piece of a `pyarrow.Table`, which follow each other: views of its memory, by name.

    Lists of any type are rows of one shape if all of them have the same length, as `datasets.Array2D` has, and as
    tokens have that were padded. Relative paths of files lead from `folder`.
    """
    columns = {}
    for name in table.column_names:
        _check_type(table.schema.field(name).type, name)
        chunks = [_of_one_shape(chunk, name) for chunk in table.column(name).chunks if len(chunk)]
        if len({chunk.type for chunk in chunks}) > 1:
            raise _different_lengths(name, " and ".join(sorted({str(chunk.type) for chunk in chunks})))
        columns[name] = pyarrow.chunked_array(chunks)
    batches = pyarrow.table(columns).to_batches()
    return [
        {name: _column_of(batch.column(name), f"column {name!r}", folder) for name in columns} for batch in batches
    ]


def _check_type(kind: Any, name: str) -> None:
    inner = kind
    while is_a(inner, *_LISTS) or isinstance(inner, pyarrow.ExtensionType):
        inner = inner.storage_type if isinstance(inner, pyarrow.ExtensionType) else inner.value_type
    try:
        if not is_encoded(kind):
            row_of(inner, name)
    except TypeError:
        raise TypeError(
            f"column {name!r} must have rows that are numbers, bytes or text, or lists of numbers, got {kind}; "
            "make numbers of it with dataset.cast_column, dataset.flatten or dataset.map, as the table in "
            "docs/hugging_face.md#which-columns-are-read says, or leave the column out with columns=[...]"
        ) from None


def _column_of(array: Any, label: str, folder: str) -> AnyColumn:
    if not _is_file(array.type):
        return column_of(array, label)
    fields = {field.name: column_of(part, label) for field, part in zip(array.type, array.flatten(), strict=True)}
    data, paths = fields["bytes"], fields["path"]
    null = None if data.null is None or paths.null is None else data.null & paths.null
    return FileColumn(data, paths, null, folder)


def _of_one_shape(array: Any, name: str) -> Any:
    """A `pyarrow.Array` in the same memory, with lists of fixed sizes in place of others and of extensions."""
    if isinstance(array.type, pyarrow.ExtensionType):  # of `datasets`, such as that of `Array2D`
        return _of_one_shape(array.storage, name)
    if not is_a(array.type, *_LISTS):
        return array
    if is_a(array.type, "fixed_size_list"):
        length, first = array.type.list_size, array.offset * array.type.list_size
    else:
        ends = np.asarray(array.offsets)
        lengths, first = np.diff(ends), int(ends[0])
        if lengths.min() < 0:
            raise ValueError(
                f"column {name!r}: the positions of its lists must ascend; the table is damaged, make it again"
            )
        if (lengths != lengths[0]).any():
            raise _different_lengths(name, f"{lengths.min()} to {lengths.max()} values")
        length = int(lengths[0])
    values = _of_one_shape(array.values.slice(first, length * len(array)), name)
    mask = array.is_null() if array.null_count else None
    return pyarrow.FixedSizeListArray.from_arrays(values, length, mask=mask)


def _different_lengths(name: str, found: str) -> ValueError:
    return ValueError(
        f"column {name!r} must have lists of one length, and they have {found}; pad them with dataset.map, or "
        "read them by their offsets with feedline.Ragged (docs/hugging_face.md). If the rows of this dataset were "
        "selected from others, copy them with dataset.flatten_indices(). columns=[...] leaves the column out"
    )


# --- folders that Dataset.save_to_disk wrote ---


def _loaded(folder: str, files: Files | None) -> tuple[Files, Any, Any, Mapping[str, Any]]:
    """A saved folder: its files, the tables of its rows and of the row indices, what `set_format` had set."""
    state = _state_of(folder) or {}
    paths = _files_in(folder, state, "_data_files")
    indices = [path for key in _INDICES for path in _files_in(folder, state, key)]
    files = files or Files([*paths, *indices])
    table = _joined(files[: len(paths)])
    form = {key: state.get(f"_{key}") for key in ("format_kwargs", "output_all_columns")}
    form |= {"type": state.get("_format_type"), "columns": state.get("_format_columns") or table.column_names}
    return files, table, _joined(files[len(paths) :]) if indices else None, form


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return _state_of(folder) is not None


def check_no_cache(paths: Sequence[str]) -> None:
    """Refuse, with a ValueError, Arrow files that are not all rows of one dataset, or not in their order.

    `dataset.map` and `filter` write the rows that they return beside the files of the dataset.
    """
    caches = [path for path in paths if _CACHED.fullmatch(os.path.basename(path))]
    if 0 < len(caches) < len(paths):
        raise ValueError(
            "dataset.map, filter and shuffle of Hugging Face cache results beside the files of a dataset, and "
            f"{caches[0]} is such a cache; open the folder by its path: open_source({os.path.dirname(paths[0])!r})"
            "; or leave it out, by the glob data-*.arrow for example, or pass the dataset: open_source(dataset)"
        )
    for folder in {os.path.dirname(path) for path in paths if not is_url(path)}:
        if any((_state_of(folder) or {}).get(key) for key in _INDICES):
            raise ValueError(
                f"rows of this dataset are those that a file of indices selects; open the folder {folder or '.'} "
                "by its path"
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
        if any(os.path.basename(name) != name for name in names):
            raise ValueError("one lies elsewhere")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{folder}/{STATE} must name files of its folder under {key!r}, got {state[key]!r}; save it again"
        ) from error
    return [os.path.join(folder, name) for name in names]


def _joined(files: Sequence[File]) -> Any:
    """The rows of some files, one after the other, as a `pyarrow.Table` of mapped memory."""
    tables = []
    for file in files:
        with naming_file(file.name, "an Arrow file", REWRITE):
            schema, batches = batches_of(pyarrow.BufferReader(pyarrow.py_buffer(file.memory())))
            tables.append(pyarrow.Table.from_batches(list(batches), schema))
    if not tables:
        raise ValueError("a source must have at least one row, and this dataset has no files")
    return pyarrow.concat_tables(tables)
