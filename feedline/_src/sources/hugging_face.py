"""Datasets of Hugging Face's library `datasets`: rows of numbers are read as columns, others as records.

A dataset is an object of that library, or a folder of `Dataset.save_to_disk`, which the library loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.files import Files
from feedline._src.formats.arrow import END_OF_STREAM, column_of, is_a, is_bytes, leaf_of, pyarrow
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Library, require
from feedline._src.formats.table import Column
from feedline._src.order.epoch import Positions, RowOrder
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import Cut, EncodedSource, Indexed, Record, Rows, Source, indices_of
from feedline._src.sources.arrays import ArraySource

_CACHED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_CHECKS_A_READ = 4  # files, at some 5 µs each
_SAMPLED_ROWS = 64
_LEAVE_OUT = (
    "leave such rows out, dataset.filter(lambda value: value is not None, input_columns=[{name!r}]), or the "
    "column, with columns=[...]"
)
compute: Any = Library("pyarrow.compute", "arrow")


# --- which objects and folders are datasets ---


class HuggingFaceDataset(Protocol):
    """What a `datasets.Dataset` has: the Arrow table, what `set_format` has set, and the files that are mapped."""

    data: Any
    format: Mapping[str, Any]
    column_names: list[str]
    cache_files: list[dict[str, str]]


def is_dataset(value: Any) -> TypeGuard[HuggingFaceDataset]:
    """Whether it is a `datasets.Dataset`. TypeError: it is another class of that library."""
    if _is(value, "DatasetDict") or _is(value, "IterableDatasetDict"):
        names = ", ".join(repr(name) for name in value)
        raise TypeError(
            f"a source is the dataset of one split, got a {type(value).__name__} with the splits {names}; pass "
            f"one of them, dataset[{next(iter(value), 'train')!r}], or load_dataset(..., split=...)"
        )
    if _is(value, "IterableDataset"):
        raise TypeError(
            "rows of a source have random access, and those of an IterableDataset only come one after the other; "
            "load the dataset without streaming=True, or pass it as a stream: docs/formats.md#streaming "
            "shows how"
        )
    return _is(value, "Dataset")


def _is(value: Any, name: str) -> bool:
    """Whether it is an object of this class of `datasets`, if that was imported."""
    return isinstance(value, getattr(sys.modules.get("datasets"), name, ()))


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json"))


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


# --- opening ---


def open_dataset(dataset: HuggingFaceDataset | str, options: OpenOptions) -> DatasetRows | DatasetRecords:
    """The rows of a dataset, or of a saved folder: encoded ones if a chosen column has bytes, text or files.

    Raises:
      ValueError: an option other than columns, no rows, a damaged table or folder, nulls, lists of different
        lengths, a transform, or a format that converts values.
      TypeError: a column holds neither numbers nor bytes.
      ImportError: it is a folder, and `datasets` is not installed.
    """
    if others := options.given() - {"columns"}:
        names = ", ".join(sorted(others))
        raise ValueError(f"a dataset of Hugging Face takes only the option columns, got {names}; leave it out")
    return _opened(_loaded(dataset) if isinstance(dataset, str) else dataset, options)


def _opened(
    dataset: HuggingFaceDataset, options: OpenOptions, files: Files | None = None
) -> DatasetRows | DatasetRecords:
    """`files`: those that the dataset maps, in the expected versions; None: as they are."""
    files = files or Files([file["filename"] for file in dataset.cache_files])
    table = _plain_table(dataset, options, files)
    has_bytes = any(map(is_bytes, table.schema.types))
    return (DatasetRecords if has_bytes else DatasetRows)(dataset, options, files, table)


def _unpickled(files: Files, dataset: bytes, options: OpenOptions) -> DatasetRows | DatasetRecords:
    """A copy of a source that another process has open. `files` are compared before the dataset is loaded."""
    return _opened(pickle.loads(dataset), options, files)


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
    """The chosen columns, as a `pyarrow.Table` of types that `column_of` takes, in the memory of the dataset."""
    table = dataset.data.table.select(options.chosen(_columns_of(dataset), "this dataset"))
    if table.num_rows == 0:
        raise _no_rows()
    try:
        table.validate()  # buffer sizes: damaged files could crash the process
    except ValueError as error:
        where = f", in {', '.join(files.paths[:3])}" if files else ""
        raise ValueError(
            f"the table of this dataset is damaged{where}: {error}; make the dataset again"
        ) from error
    return pyarrow.table({name: _plain(table.column(name), name) for name in table.column_names})


def _columns_of(dataset: HuggingFaceDataset) -> Sequence[str]:
    """The columns that a format chooses. ValueError if it converts the values of the table."""
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


def _plain(column: Any, name: str) -> Any:
    """A `pyarrow.ChunkedArray` in the same memory, with files as their bytes, and lists as rows of one shape.

    Lists of any type are rows of one shape if all of them have the same length, as those of `datasets.Array2D`
    and padded tokens do.
    """
    if _is_file(column.type):
        return _bytes_of_files(column, name)
    kind = _of_one_shape(column.type, next(chunk for chunk in column.chunks if len(chunk)))
    if leaf_of(kind) is None:
        raise TypeError(
            f"column {name!r} must have rows that are numbers, bytes or text, or lists of numbers, got "
            f"{column.type}; make numbers of it with dataset.cast_column, dataset.flatten or dataset.map, as the "
            "table in docs/formats.md#hugging-face-datasets says, or leave the column out with columns=[...]"
        )
    try:
        return column.cast(kind)  # no copy, unless lists are null
    except ValueError as error:
        raise ValueError(
            f"column {name!r} must have lists of one length, and some differ from the first, {kind}; pad "
            "them with dataset.map, or read them by their offsets with feedline.Ragged (docs/formats.md). If the "
            "rows of this dataset were selected from others, copy them with dataset.flatten_indices(). "
            "columns=[...] leaves the column out"
        ) from error


def _of_one_shape(kind: Any, rows: Any) -> Any:
    """A `pyarrow.DataType` with lists of the lengths in the first row, and without extensions of `datasets`."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _of_one_shape(kind.storage_type, rows.storage)
    if not is_a(kind, "list", "large_list", "fixed_size_list"):
        return kind
    values = rows.slice(max(0, compute.index(rows.is_valid(), True).as_py()), 1).flatten()
    length = kind.list_size if is_a(kind, "fixed_size_list") else len(values)
    return pyarrow.list_(_of_one_shape(kind.value_type, values), length)


def _is_file(kind: Any) -> bool:
    """Whether it is the type of `datasets.Image`, `Audio` and their like: files by their bytes or paths."""
    fields = {field.name: field.type for field in kind} if is_a(kind, "struct") else {}
    return fields.keys() == {"bytes", "path"} and all(map(is_bytes, fields.values()))


def _bytes_of_files(column: Any, name: str) -> Any:
    data, paths = (compute.struct_field(column, field) for field in ("bytes", "path"))
    outside = compute.sum(compute.and_(data.is_null(), paths.is_valid())).as_py() if data.null_count else 0
    if outside:
        raise ValueError(
            f"files of a dataset must lie in it, and {outside:,} of {len(column):,} in column {name!r} lie at "
            "paths; copy them into it, dataset.save_to_disk(folder), and open that folder; or open the files "
            "themselves (docs/sources.md#encoded-rows)"
        )
    return data


def _no_rows() -> ValueError:
    return ValueError("a source must have at least one row, and this dataset has none")


# --- sources ---


class _Dataset(Indexed):
    """Rows of a dataset. Their identity does not depend on how it is cut into files and pieces.

    The fingerprint of `datasets` is not part of it: it depends on file times, so machines differ in it.

    Args:
      files: those that the dataset maps; empty for one in memory.
      table: its columns, as `_plain_table` returns them.
    """

    def __init__(self, dataset: HuggingFaceDataset, options: OpenOptions, files: Files, table: Any) -> None:
        self._dataset, self._options, self._mapped = dataset, options, files
        self._to_check = itertools.cycle(list(files))  # of a list: threads share this iterator
        self._names: list[str] = table.column_names
        self._pieces: list[dict[str, Column]] = [
            {name: column_of(batch.column(name)) for name in self._names} for batch in table.to_batches()
        ]
        selected: Any = dataset._indices  # type: ignore[attr-defined]  # no public attribute has them
        self._selected: Indices | None = None
        """For each row its row in the table; None: they are the same."""
        if selected is not None:
            self._selected = np.asarray(selected.table.column(0).to_numpy(), np.uint64).view(np.int64)
        count = table.num_rows if self._selected is None else len(self._selected)
        if count == 0:
            raise _no_rows()
        self._rows = Shards([count])

    @property
    def identity(self) -> dict[str, Any]:
        """Names and types of the columns, and sampled rows."""
        hashed = hashlib.sha256()
        for row in digests.sampled(len(self), _SAMPLED_ROWS):
            try:
                values = self._single(row)
            except RowError:  # on all machines alike, or else the processes' data would differ
                values = b"a bad row"
            for value in values.values() if isinstance(values, Mapping) else [values]:
                data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
                hashed.update(b"%d " % len(data) + data[: digests.SAMPLED_BYTES])
        columns = [list(column) for column in self._described()]
        return {"kind": "dataset", "rows": len(self), "columns": columns, "sampled": hashed.hexdigest()[:32]}

    def __len__(self) -> int:
        return len(self._rows)

    def _in_table(self, rows: Indices) -> Indices:
        """Where these rows lie in the table. IndexError: there is no such row."""
        self._rows.check(rows)
        return rows if self._selected is None else self._selected[rows]

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Refuse, with a FeedError, what is read in the block if a file was written to, also meanwhile.

        Only the next few of many files are checked each time, to stay cheap.
        """
        few = list(itertools.islice(self._to_check, min(_CHECKS_A_READ, len(self._mapped))))
        for file in few:
            file.check_open()
        try:
            yield
        except FeedError:
            few = list(self._mapped)  # a change explains it better
            raise
        finally:
            for file in few:
                file.check_open()

    def __reduce__(self) -> Any:
        return _unpickled, (self._mapped, pickle.dumps(self._dataset), self._options)


class DatasetRows(_Dataset, Source):
    """The rows of a dataset of numbers, which are copied from the memory of its table."""

    reads_columns = True

    def __init__(self, dataset: HuggingFaceDataset, options: OpenOptions, files: Files, table: Any) -> None:
        super().__init__(dataset, options, files, table)
        self.picklable = bool(files)  # worker processes map them
        for name in self._names:
            self._check_no_null(name)
        self._table = ArraySource(
            [{name: column.values for name, column in piece.items()} for piece in self._pieces]
        )
        self.spec = self._table.spec

    def _check_no_null(self, name: str) -> None:
        columns = [piece[name] for piece in self._pieces]
        if all(column.null is None for column in columns):
            return
        null = np.concatenate([np.zeros(c.rows, np.bool_) if c.null is None else c.null for c in columns])
        rows = np.flatnonzero(null if self._selected is None else null[self._selected])
        if len(rows):
            raise ValueError(
                f"every column of a row must have a value, and {name!r} is null in {len(rows):,} of "
                f"{len(self):,} rows, the first of them row {rows[0]:,}; fill them with dataset.map "
                f"(docs/formats.md), or {_LEAVE_OUT.format(name=name)}"
            )

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        in_table = self._in_table(indices_of(rows))
        with self._unchanged():
            self._table.read_cuts(in_table, cuts)

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`: one C call, unless the dataset has indices of its own, as after `shuffle` or `filter`."""
        if self._selected is not None:
            return super().read_ordered(order, epoch, positions, cuts)
        with self._unchanged():
            return self._table.read_ordered(order, epoch, positions, cuts)


class DatasetRecords(_Dataset, EncodedSource):
    """An `EncodedSource` over a dataset some columns of which hold bytes, text or files. Reads are thread-safe."""

    instead = ", or leave columns of bytes and text out with open_source(dataset, columns=[...])"

    def __init__(self, dataset: HuggingFaceDataset, options: OpenOptions, files: Files, table: Any) -> None:
        super().__init__(dataset, options, files, table)
        self._piece_of_row = Shards([piece[self._names[0]].rows for piece in self._pieces])
        self.fields = tuple(self._names) if len(self._names) > 1 else None

    def records(self, rows: Indices) -> Sequence[Record]:
        """See `EncodedSource`: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: also a null.
        """
        found: list[dict[str, Any]] = [{} for _ in rows]
        in_table = self._in_table(rows)
        with self._unchanged():
            for piece, local, offsets in self._piece_of_row.split(in_table):
                places = np.arange(len(rows))[offsets]
                for name, column in self._pieces[piece].items():
                    values = _taken(name, column, local, rows[places])
                    for place, value in zip(places.tolist(), values, strict=True):
                        found[place][name] = value
        return [row[self._names[0]] for row in found] if self.fields is None else found

    def _described(self) -> list[tuple[str, str]]:
        if self.fields is None:
            return super()._described()
        return [(name, _form_of(column)) for name, column in self._pieces[0].items()]


def _form_of(column: Column) -> str:
    return "bytes" if column.ends is not None else f"{column.values.dtype}{list(column.values.shape[1:])}"


def _taken(name: str, column: Column, local: Indices, rows: Indices) -> list[Any]:
    """The values of a column: the rows `local` of a piece, which are `rows` of the dataset."""
    if column.null is not None and (null := column.null[local]).any():
        rule = f"every column of a row must have a value, and {name!r} is null in this row"
        raise _bad_row(rule, name, rows[np.argmax(null)])
    try:
        return column.take(local)
    except (MemoryError, ValueError) as error:
        raise _bad_row(f"column {name!r} of this dataset could not be read: {error}", name, rows[0]) from error


def _bad_row(rule: str, name: str, row: int) -> RowError:
    change = f"take another row in its place, feedline.Reading(bad_rows='substitute'), or {_LEAVE_OUT}"
    return RowError(f"{rule}; {change.format(name=name)}", stage="read", row=int(row))
