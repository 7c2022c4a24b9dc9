"""The source of encoded rows of a dataset: images, audio, text and bytes, with numbers beside them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.open_files import unreadable
from feedline._src.formats import extras
from feedline._src.formats.arrow_columns import column_of, is_bytes
from feedline._src.formats.grouped_file import ByteColumn, Group
from feedline._src.rows import digests
from feedline._src.rows.bad_rows import raise_of_signal_handler
from feedline._src.rows.encoded_source import EncodedRows, Record
from feedline._src.rows.shards import Indices, Shards
from feedline._src.sources.hugging_face.columns import check_type, values_of
from feedline._src.sources.hugging_face.dataset import OpenDataset


class FileColumn(NamedTuple):
    """Files, each of which is in the table or lies at a path: `datasets.Image`, `datasets.Audio` and their like.

    Attributes:
      data: the bytes; null where the file lies at a path.
      paths: null where there is none.
      null: bool[k], true where there is neither; None if there is no such row.
    """

    data: ByteColumn
    paths: ByteColumn
    null: npt.NDArray[np.bool_] | None

    @classmethod
    def of(cls, array: Any, label: str) -> FileColumn:
        """A `pyarrow.StructArray` with the fields "bytes" and "path"."""
        fields = {field.name: part for field, part in zip(array.type, array.flatten(), strict=True)}
        data, paths = column_of(fields["bytes"], label), column_of(fields["path"], label)
        assert isinstance(data, ByteColumn)
        assert isinstance(paths, ByteColumn)
        null = None if data.null is None or paths.null is None else data.null & paths.null
        return cls(data, paths, null)

    def path_of(self, row: int) -> str | None:
        """The path of a file that is not in the table; None: it is in the table."""
        if self.data.null is None or not self.data.null[row]:
            return None
        return os.fsdecode(self.paths.take(np.array([row]))[0])


Column = Group | ByteColumn | FileColumn


def _is_file(kind: Any) -> bool:
    """Whether it is the type of files by bytes or path."""
    if not extras.require("pyarrow", "arrow").types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind}
    return fields.keys() == {"bytes", "path"} and all(map(is_bytes, fields.values()))


def has_bytes(schema: Any) -> bool:
    """Whether a column of the table holds bytes, text or files."""
    return any(is_bytes(kind) or _is_file(kind) for kind in schema.types)


class DatasetRecords(EncodedRows):
    """An `EncodedSource` over a dataset some columns of which hold bytes, text or files. Reads are thread-safe.

    Args:
      found: the dataset, with the columns to read.

    Raises:
      TypeError: a column holds neither bytes nor numbers.
      ValueError: a column has lists of different lengths.
    """

    instead = ", or leave columns of bytes and text out with open_source(dataset, columns=[...])"

    def __init__(self, found: OpenDataset) -> None:
        self._found = found
        names: list[str] = found.table.column_names
        for field in found.table.schema:
            if not (is_bytes(field.type) or _is_file(field.type)):
                check_type(field.type, f"column {field.name!r}")
        self.fields = tuple(names) if len(names) > 1 else None
        pieces = [piece for piece in found.table.to_batches() if piece.num_rows]
        self._pieces = [_columns(piece) for piece in pieces]
        self._shards = Shards([piece.num_rows for piece in pieces] or [0])
        self._kinds = {name: _kind(column) for name, column in self._pieces[0].items()}
        for piece in self._pieces:
            kinds = {name: _kind(column) for name, column in piece.items()}
            if kinds != self._kinds:
                raise ValueError(
                    f"columns must have rows of one shape, and this dataset has {self._kinds} and {kinds}; pad "
                    "lists with dataset.map, or leave the column out with columns=[...]"
                )

    @property
    def identity(self) -> dict[str, Any]:
        """Names and types of the columns, and sampled rows, however the dataset is cut into files and pieces."""
        hashed = hashlib.sha256()
        for row in self._found.sampled_rows:
            try:
                record = self.records(row.reshape(1))[0]
            except RowError as error:  # on all machines, or the processes are told that their data differ
                raise_of_signal_handler(error)
                record = b"a bad row"
            for value in record.values() if isinstance(record, Mapping) else [record]:
                data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
                hashed.update(b"%d " % len(data) + data[: digests.SAMPLED_BYTES])
        kinds = [[name, kind] for name, kind in self._kinds.items()]
        return {"kind": "dataset", "rows": len(self), "columns": kinds, "sampled": hashed.hexdigest()[:32]}

    def __len__(self) -> int:
        return len(self._found)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The rows: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: a value is null, or a file cannot be read.
          FeedError: a file was changed, or an image file is gone.
        """
        self._found.check_files()
        records: list[Record] = [b""] * len(rows)
        for piece, local, offsets in self._shards.split(self._found.rows_in_table(rows)):
            here = np.arange(len(rows))[offsets]
            try:
                columns = {
                    name: self._values(name, column, local, rows[here])
                    for name, column in self._pieces[piece].items()
                }
            except ValueError as error:
                raise RowError(
                    f"rows that are stored together could not be read: {error}; make the dataset again",
                    stage="read",
                    row=int(rows[here][0]),
                    file=next(iter(files)) if len(files := self._found.versions) == 1 else None,
                ) from error
            for place, values in zip(here.tolist(), zip(*columns.values(), strict=True), strict=True):
                records[place] = values[0] if self.fields is None else dict(zip(columns, values, strict=True))
        return records

    def file_of(self, row: int) -> str | None:
        """The image file of a row that has its path; None: the row is in the table."""
        ((piece, local, _),) = self._shards.split(self._found.rows_in_table(np.array([row])))
        files = (column for column in self._pieces[piece].values() if isinstance(column, FileColumn))
        return next((path for column in files if (path := column.path_of(int(local[0])))), None)

    def close(self) -> None:
        """Do nothing: the dataset belongs to the user."""

    def _values(self, name: str, column: Column, local: Indices, rows: Indices) -> Sequence[Any]:
        """The values of a column: the rows `local` of a piece, which are `rows` of the dataset."""
        if column.null is not None and (bad := np.flatnonzero(column.null[local])).size:
            raise RowError(
                f"every column of a row must have a value, and {name!r} is null in this row; leave such rows out, "
                f"dataset.filter(lambda value: value is not None, input_columns=[{name!r}]), leave the column out "
                "with columns=[...], or take another row in its place: feedline.Reading(bad_rows='substitute')",
                stage="read",
                row=int(rows[bad[0]]),
            )
        if isinstance(column, Group):
            return list(column.values[local])
        if isinstance(column, ByteColumn):
            return column.take(local)
        values = column.data.take(local)
        for i in [] if column.data.null is None else np.flatnonzero(column.data.null[local]).tolist():
            values[i] = _read(str(column.path_of(int(local[i]))), int(rows[i]))
        return values

    def _described(self) -> list[tuple[str, str]]:
        return [("row" if self.fields is None else name, kind) for name, kind in self._kinds.items()]

    def __reduce__(self) -> Any:
        return DatasetRecords, (self._found,)


def _read(path: str, row: int) -> bytes:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(f"{path} is no regular file")  # a pipe would be waited for
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise FeedError(
            "a file of a dataset must lie in it or at its path, and there is none at this path; load the dataset "
            "where its files are, and copy them into it: dataset.save_to_disk(folder)",
            stage="read",
            file=path,
        ) from None
    except (OSError, MemoryError) as error:
        raise unreadable(error, row, path) from error


def _columns(piece: Any) -> dict[str, Column]:
    """The columns of a `pyarrow.RecordBatch`."""
    columns: dict[str, Column] = {}
    for name in piece.schema.names:
        array, label = piece.column(name), f"column {name!r}"
        if _is_file(array.type):
            columns[name] = FileColumn.of(array, label)
        else:
            columns[name] = column_of(array, label) if is_bytes(array.type) else values_of(array, label)
    return columns


def _kind(column: Column) -> str:
    return f"{column.values.dtype}{list(column.values.shape[1:])}" if isinstance(column, Group) else "bytes"
