"""Datasets of Hugging Face's library `datasets`: their Arrow table and its columns.

A dataset is an object of that library, or a folder of `Dataset.save_to_disk`, which the library loads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.file import Indices
from feedline._src.files.files import Files
from feedline._src.formats.arrow import END_OF_STREAM, column_of, is_a, is_bytes, pyarrow, row_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import require
from feedline._src.formats.table import Column
from feedline._src.rows import digests

STATE = "state.json"
_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
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
            "load the dataset without streaming=True, or pass it as a stream: docs/formats.md#streaming "
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
      dataset: of one split.
      files: into which the dataset is mapped, of the expected versions; None: the present ones.

    Attributes:
      table: a `pyarrow.Table` of the chosen columns.
      rows: for each of the `count` rows its row in the table; None: they are the same.
      files: empty for a dataset in memory.
    """

    def __init__(self, dataset: HuggingFaceDataset, options: OpenOptions, files: Files | None = None) -> None:
        self._dataset, self._options = dataset, options
        self.files = files or Files([file["filename"] for file in dataset.cache_files])
        self._to_check = itertools.cycle(list(self.files))  # of a list: threads share this iterator
        table, names = dataset.data.table, _columns_of(dataset)
        self.table = table.select(options.chosen(names, "this dataset"))
        try:
            self.table.validate()  # sizes of buffers: damaged files could end the process else
        except ValueError as error:
            where = f", in {', '.join(self.files.paths[:3])}" if self.files else ""
            raise ValueError(
                f"the table of this dataset is damaged{where}: {error}; make the dataset again"
            ) from error
        self.rows: Indices | None = None
        selected: Any = dataset._indices  # type: ignore[attr-defined]  # no public attribute has them
        if selected is not None:
            self.rows = np.asarray(selected.table.column(0).to_numpy(), np.uint64).view(np.int64)
        self.count: int = self.table.num_rows if self.rows is None else len(self.rows)
        if self.count == 0:
            raise ValueError("a source must have at least one row, and this dataset has none")

    @property
    def sampled_rows(self) -> Indices:
        """The rows that the identity samples."""
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
        return _opened_again, (self.files, pickle.dumps(self._dataset), self._options)


def _opened_again(files: Files, dataset: bytes, options: OpenOptions) -> OpenDataset:
    """A copy of a dataset that another process has open. `files` are compared before it is loaded."""
    return OpenDataset(pickle.loads(dataset), options, files)


def _columns_of(dataset: HuggingFaceDataset) -> Sequence[str]:
    """The columns that a format chooses. ValueError if it makes other values of those in the table."""
    form = dataset.format
    if form["type"] == "custom" or form["format_kwargs"]:
        raise ValueError(
            "open_source reads the values that are stored, and this dataset has a transform (with_transform), or "
            f"a format that converts them ({dict(form['format_kwargs'] or {})}); pass the dataset itself to the "
            "feed, which then reads row by row and calls it; or remove it with dataset.with_format(None), and use "
            "feedline.decoded, Feed(transform=...) or dataset.cast_column"
        )
    chosen: Sequence[str] = dataset.data.table.column_names if form["output_all_columns"] else form["columns"]
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
    """

    data: Column
    paths: Column
    null: Any

    @property
    def rows(self) -> int:
        """k."""
        return self.data.rows

    def path_of(self, row: int) -> str | None:
        """The path of a file that is not in the table; None: it is in the table."""
        if self.data.null is None or not self.data.null[row]:
            return None
        return os.fsdecode(self.paths.take(np.array([row]))[0])

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


def columns_of(table: Any) -> list[dict[str, AnyColumn]]:
    """The columns of each piece of a `pyarrow.Table`, which follow each other: views of its memory, by name.

    Lists of any type are rows of one shape if all of them have the same length, as `datasets.Array2D` has, and as
    tokens have that were padded.
    """
    columns = {}
    for name in table.column_names:
        _check_type(table.schema.field(name).type, name)
        chunks = [_of_one_shape(chunk, name) for chunk in table.column(name).chunks if len(chunk)]
        if len({chunk.type for chunk in chunks}) > 1:
            raise _different_lengths(name, " and ".join(sorted({str(chunk.type) for chunk in chunks})))
        columns[name] = pyarrow.chunked_array(chunks)
    batches = pyarrow.table(columns).to_batches()
    return [{name: _column_of(batch.column(name), f"column {name!r}") for name in columns} for batch in batches]


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
            "docs/formats.md#hugging-face-datasets says, or leave the column out with columns=[...]"
        ) from None


def _column_of(array: Any, label: str) -> AnyColumn:
    if not _is_file(array.type):
        return column_of(array, label)
    fields = {field.name: column_of(part, label) for field, part in zip(array.type, array.flatten(), strict=True)}
    data, paths = fields["bytes"], fields["path"]
    null = None if data.null is None or paths.null is None else data.null & paths.null
    return FileColumn(data, paths, null)


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
        "read them by their offsets with feedline.Ragged (docs/formats.md). If the rows of this dataset were "
        "selected from others, copy them with dataset.flatten_indices(). columns=[...] leaves the column out"
    )


# --- folders that Dataset.save_to_disk wrote ---


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (STATE, "dataset_info.json"))


def load_saved(folder: str) -> HuggingFaceDataset:
    """The dataset in a folder for which `is_saved` is true.

    Raises:
      ImportError: `datasets` is not installed.
      ValueError: the folder is damaged.
    """
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


def check_no_cache(paths: Sequence[str]) -> None:
    """Refuse, with a ValueError, Arrow files if some are caches of `dataset.map` and `filter`.

    They lie beside the files of a dataset, and have the rows that these return.
    """
    caches = [path for path in paths if _CACHED.fullmatch(os.path.basename(path))]
    if 0 < len(caches) < len(paths):
        raise ValueError(
            "dataset.map, filter and shuffle of Hugging Face cache results beside the files of a dataset, and "
            f"{caches[0]} is such a cache; open the folder by its path: open_source({os.path.dirname(paths[0])!r})"
            "; or leave it out, by the glob data-*.arrow for example, or pass the dataset: open_source(dataset)"
        )
