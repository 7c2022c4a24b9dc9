"""Records of bytes in files, found by an index or by a library: TFRecord, tar, ArrayRecord, JSON lines."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.errors import RowError
from feedline._src.files.file import unreadable
from feedline._src.files.files import Files
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import BadRecordError, RecordReader, Records, described
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import EncodedSource, Indexed, Record, Source, WillRead
from feedline._src.rows.spec import RowSpec
from feedline._src.sources.record_index import Index, IndexedFile, open_index

_RECORDS_A_READ = 1 << 11  # fewer are slower to read, more leave the processor's cache


def open_records(
    format: Format, files: Files, options: OpenOptions, indices: Sequence[Index] | None = None
) -> RecordFiles | RecordArrays:
    """The rows of files of records: bytes, or arrays if the format or the options say how to make them.

    Args:
      options: `columns` selects fields.
      indices: as another process opened them; None: they are opened, and made if need be.

    Raises:
      ValueError: no records, not of this format, or files with different fields.
      OSError: no index can be written.
      RowError: the format gives no spec of arrays, and the first record cannot be unpacked.
      FeedError: a file was changed, or a store cannot be read.
    """
    assert format.open is not None
    first = next((number for number, file in enumerate(files) if file.size), 0)
    form = files.opened(first, functools.partial(format.open, options=options))
    face = RecordFiles if form.unpack is None else RecordArrays
    return face(format, form, files, options, indices)


class _Records(Indexed):
    """Files of records. Thread-safe. With an index, at most 64 files are open, and nothing is held in memory."""

    def __init__(
        self, format: Format, form: Records, files: Files, options: OpenOptions, indices: Sequence[Index] | None
    ) -> None:
        self._format, self.form, self._files, self._options = format, form, files, options
        self._paths = files.paths
        self._indexed: list[IndexedFile] = []
        if form.open is not None:
            files.local_paths()  # of all files at once
            self._readers: Sequence[RecordReader] = [form.open(file) for file in files]
        else:
            if indices is None:
                digests = zip(files, files.digests, strict=True)
                indices = [open_index(file, digest, format.name, form) for file, digest in digests]
            self._readers = self._indexed = [
                IndexedFile(file, index, format.name, form, files.open_files)
                for file, index in zip(files, indices, strict=True)
            ]
        self._shards = Shards([reader.count for reader in self._readers])
        if len(self._shards) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self._paths[0]} with no records; check what wrote it"
            )
        found = [
            (path, reader.fields) for path, reader in zip(self._paths, self._readers, strict=True) if reader.count
        ]
        first_path, first = found[0]
        for path, fields in found:
            if sorted(fields or ()) != sorted(first or ()):
                raise ValueError(
                    f"all files must have the same fields, and {path} has {', '.join(fields or ())}, "
                    f"{first_path} {', '.join(first or ())}; open them apart, or write them again"
                )
        self._parts = None if first is None else tuple(options.chosen(first, self._paths[0]))
        """The parts of a record that are read; None: it is one part."""
        leaves = None if form.leaves is None else tuple(form.leaves)
        self._fields = leaves if self._parts is None else self._parts

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        for file in self._files:
            file.check()
        found: dict[str, Any] = {"kind": self._format.name, "files": [reader.digest for reader in self._readers]}
        if self._indexed:
            found["fields"] = None if self._fields is None else list(self._fields)
        return found

    def __len__(self) -> int:
        return len(self._shards)

    def _read(self, rows: Indices) -> Iterator[tuple[int, Indices, Indices, list[Any]]]:
        """The rows in pieces that are fast to read: file, ascending records, their offsets in `rows`, data."""
        if self.will_read is not None:
            self.will_read(rows, 0)  # fetches of all files at once
        for number, local, offsets in self._shards.split(rows):
            order = np.argsort(local, kind="stable")
            here, ordered = np.arange(len(rows))[offsets][order], local[order]
            for start in range(0, len(order), _RECORDS_A_READ):
                some = slice(start, start + _RECORDS_A_READ)
                yield number, ordered[some], here[some], self._data(number, ordered[some])

    def _data(self, number: int, records: Indices) -> list[Any]:
        try:
            return self._readers[number].read(records, self._parts)
        except BadRecordError as error:
            raise self._error(
                number,
                error.record,
                f"a record must be read as it was written, and of record {error.record} {error}, or take another "
                "row in its place with feedline.Reading(bad_rows='substitute')",
            ) from error
        except (OSError, MemoryError) as error:
            path = getattr(error, "filename", None) or self._paths[number]
            raise unreadable(error, int(self._shards.firsts[number] + records[0]), path) from error

    def _error(self, number: int, record: int, message: str) -> RowError:
        """The error for a record of a file."""
        row = int(self._shards.firsts[number] + record)
        return RowError(message, stage="read", row=row, file=self._paths[number])

    @property
    def will_read(self) -> WillRead | None:
        """For objects in a store; None for files."""
        return self._fetch_ahead if self._indexed and self._files.in_store else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        parts = self._shards.split(rows)
        places = ((number, *self._indexed[number].places(local, self._parts)) for number, local, _ in parts)
        return self._files.will_read(places, ahead)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._shards.of(np.array([row]))[0])]

    def close(self) -> None:
        """Close the files. A later `records` opens them again."""
        self._files.close()
        for reader in self._readers:
            reader.close()

    def __reduce__(self) -> Any:
        indices = [file.index for file in self._indexed]
        return open_records, (self._format, self._files, self._options, indices)


class RecordFiles(_Records, EncodedSource):
    """An `EncodedSource` over files of records."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fields, self.instead = self._fields, self.form.instead

    def records(self, rows: Indices) -> Sequence[Record]:
        """The records of these rows: bytes, or dicts.

        Raises:
          IndexError: there is no such row.
          RowError: a record cannot be read, or is damaged.
          FeedError: a file or its index was changed or deleted.
        """
        found: list[Record] = [b""] * len(rows)
        for _, _, offsets, data in self._read(rows):
            for offset, record in zip(offsets.tolist(), data, strict=True):
                found[offset] = record
        return found

    def _described(self) -> list[tuple[str, str]]:
        if self.form.leaves is None:
            return super()._described()
        return [(name, described(leaf)) for name, leaf in self.form.leaves.items()]


class RecordArrays(_Records, Source):
    """A `Source` over files of records of which arrays are made, many at once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        spec = self.form.spec
        if spec is None:
            ((number, records, _, data),) = self._read(np.zeros(1, np.int64))
            row = self._unpacked(number, records, data)
            spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), row)
        self._spec = RowSpec.of(spec)
        self.spec = self._spec.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._spec.leaves])

    @property
    def files(self) -> Iterable[str] | None:
        """None where a function of the user unpacks the records."""
        return super().files if self.form.files else None

    def read(self, rows: Indices, out: Any) -> None:
        """Write record rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a record cannot be read, or has another form than the spec; it names the row and its file.
          FeedError: a file was written to or truncated.
        """
        targets = jax.tree_util.tree_leaves(out)
        for number, records, offsets, data in self._read(rows):
            leaves, treedef = jax.tree_util.tree_flatten(self._unpacked(number, records, data))
            found = [(value.shape, value.dtype) for value in leaves]
            wanted = [((len(records), *leaf.shape), leaf.dtype) for leaf in self._spec.leaves]
            if treedef != self._spec.treedef or found != wanted:
                raise self._error(
                    number,
                    records[0],
                    f"decode must give arrays of one form; of {len(records)} records from this one on it made "
                    f"{found}, and the form of the first record gives {wanted}; crop or pad them there",
                )
            for target, values in zip(targets, leaves, strict=True):
                target[offsets] = values

    def _unpacked(self, number: int, records: Indices, data: list[Any]) -> Any:
        """Records of one file as a tree of arrays. The error names the first that alone cannot be unpacked."""
        assert self.form.unpack is not None
        try:
            return self.form.unpack(data)
        except ValueError as error:
            cause = error.__cause__ or error
            for record, alone in zip(records.tolist(), data, strict=True):
                try:
                    self.form.unpack([alone])
                except ValueError as failure:
                    raise self._error(number, record, str(failure)) from failure.__cause__ or failure
            message = f"{len(records)} records from this one on fail together, and none alone: {cause}"
            raise self._error(number, records[0], message) from cause
