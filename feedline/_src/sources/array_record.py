"""ArrayRecord files: records of bytes, read many at a time, as they are or decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError, warn
from feedline._src.files.opening import opening
from feedline._src.formats import extras
from feedline._src.formats.npy import fields
from feedline._src.formats.open_options import Decode, OpenOptions
from feedline._src.formats.versioned_files import VersionedFiles, Versions
from feedline._src.rows import digests
from feedline._src.rows.encoded_source import EncodedRows
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_array, as_record_leaf, is_list

Array = npt.NDArray[Any]
_OPTIONS = "readahead_buffer_size:0,index_storage_option:in_memory"
_RECORDS_A_READ = 1 << 11  # fewer are slower to read, more leave the cache
_BUFFER_BYTES = 1 << 15


class _Files:
    """Open ArrayRecord files, whose records follow each other. Thread-safe.

    Args:
      paths: of the files, or addresses of objects in a store, which are fetched whole into its cache.
      options: how objects are fetched.
      versions: the expected versions of the files; by default, the present ones.

    Attributes:
      paths: as given.
      versions: of the files or objects.
      shards: which file each record lies in.

    Raises:
      ValueError: no records, or not an ArrayRecord file.
      FeedError: a file does not have the expected version.
    """

    def __init__(self, paths: Sequence[str], options: OpenOptions, versions: Versions | None) -> None:
        self.paths = [str(path) for path in paths]
        self._versioned = VersionedFiles(self.paths, options.store, versions)
        self.versions = self._versioned.versions
        self._readers = [self._versioned.opened(number, _opened, options) for number in range(len(paths))]
        self.shards = Shards([reader.num_records() for reader in self._readers])
        if len(self.shards) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self.paths[0]} with no records; check what wrote it"
            )
        for path, reader in zip(self.paths, self._readers, strict=True):
            _warn_of_groups(path, reader)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        numbers = range(len(self.paths))
        digested = [digests.of_file(self._versioned[number]) for number in numbers]
        for number in numbers:
            self._versioned.check(number)
        return {"kind": "array_record", "files": digested}

    def split(self, rows: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """The rows in pieces that are fast to read: (file, its records, ascending, their offsets in `rows`)."""
        for shard, local, offsets in self.shards.split(rows):
            order = np.argsort(local, kind="stable")
            here = np.arange(offsets.start, offsets.stop)[order] if isinstance(offsets, slice) else offsets[order]
            ordered = local[order]
            for start in range(0, len(order), _RECORDS_A_READ):
                some = slice(start, start + _RECORDS_A_READ)
                yield shard, ordered[some], here[some]

    def read(self, shard: int, records: Indices) -> list[bytes]:
        """These records of a file.

        Raises:
          RowError: one of them cannot be read.
          FeedError: the file was written to or truncated.
        """
        try:
            found: list[bytes] = self._readers[shard].read(records.tolist())
        except Exception as error:
            self._versioned.check_open(shard)  # a change explains the error better
            raise self.error(shard, records[0], f"{len(records)} records could not be read: {error}") from error
        # the library reads empty records from a truncated file
        self._versioned.check_open(shard)
        return found

    def error(self, shard: int, record: int, message: str) -> RowError:
        """The error for a record of a file."""
        row = int(self.shards.firsts[shard] + record)
        return RowError(message, stage="read", row=row, file=self.paths[shard])

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()
        self._versioned.release()


def _opened(path: Path, options: OpenOptions) -> Any:
    """A reader of a file.

    Raises:
      FileNotFoundError, OSError: there is no such file, or too many files are open.
      ValueError: it is not an ArrayRecord file.
    """
    module = extras.require("array_record.python.array_record_module", "array-record")
    with opening(path):
        pass  # the library's errors do not say what to do
    try:
        reader = module.ArrayRecordReader(str(path), options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
        if not reader.ok():
            reader.read([0])  # raises an error that says what is wrong
    except Exception as error:  # the library does not document the type
        raise ValueError(
            f"{path} cannot be read as an ArrayRecord file: {error}. It may be truncated or another format; "
            "write it again with ArrayRecordWriter(path, 'group_size:1')"
        ) from error
    return reader


def _warn_of_groups(path: str, reader: Any) -> None:
    found = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")  # None in files of old versions
    if found and int(found[1]) > 1:
        warn(
            f"{path} was written in groups of {found[1]} records, which are decompressed whole whichever of "
            "them a read asks for; write it with ArrayRecordWriter(path, 'group_size:1')"
        )


class ArrayRecordSource(IndexedSource):
    """A `RowSource` over ArrayRecord files.

    Reads are thread-safe. Records are read in the order of the file, and then written to their offsets.

    Args:
      paths: of the files, whose records follow each other.
      options: `dtype` for records of one size, or `decode` for others.
      versions: the expected versions of the files; by default, the present ones.

    Raises:
      ValueError: no records, not an ArrayRecord file, or not exactly one of `dtype` and `decode`.
      RowError: the first record does not have that dtype, or cannot be decoded.
    """

    def __init__(self, paths: Sequence[str], options: OpenOptions, versions: Versions | None = None) -> None:
        if (options.dtype is None) == (options.decode is None):
            raise ValueError(
                f"records of bytes do not say what they are, got {paths[0]} with "
                f"{'neither dtype nor decode' if options.dtype is None else 'dtype and decode'}; give "
                "open_source one of dtype=np.dtype([('image', np.uint8, (32, 32, 3)), ('label', np.int32)]) and "
                "decode=..., a function of a list of bytes"
            )
        if options.decode is not None and options.columns is not None:
            raise ValueError(f"columns is for arrays with names; a decoder names its own, got {options.columns}")
        self._options = options
        self._files = _Files(paths, options, versions)
        self._paths = self._files.paths
        self._shards = self._files.shards
        first = int(np.flatnonzero(self._shards.ends)[0])
        row = self._decoded(first, np.zeros(1, np.int64))
        self._spec = RowSpec.of(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), row))
        self.spec = self._spec.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._spec.leaves])

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return self._files.identity

    @property
    def files(self) -> Iterable[str] | None:
        """As of `Indexed`; None where a function of the user decodes the records."""
        return super().files if self._options.decode is None else None

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, rows: Indices, out: Any) -> None:
        """Write record rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a record cannot be read, or has another form than the first; it names the row and its file.
          FeedError: a file was written to or truncated.
        """
        targets = jax.tree_util.tree_leaves(out)
        for shard, records, offsets in self._files.split(rows):
            leaves = self._checked(shard, records)
            for target, values in zip(targets, leaves, strict=True):
                target[offsets] = values

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _checked(self, shard: int, rows: Indices) -> list[Array]:
        """The leaves of records of a shard, after a check that they have the form of the first record."""
        leaves, treedef = jax.tree_util.tree_flatten(self._decoded(shard, rows))
        found = [(value.shape, value.dtype) for value in leaves]
        wanted = [((len(rows), *leaf.shape), leaf.dtype) for leaf in self._spec.leaves]
        if treedef != self._spec.treedef or found != wanted:
            raise self._error(
                shard,
                rows[0],
                f"decode must give arrays of one form; of {len(rows)} records from this one on it made {found}, "
                f"and the form of the first record gives {wanted}; crop or pad them there",
            )
        return leaves

    def _decoded(self, shard: int, rows: Indices) -> Any:
        """These records of a shard as a tree of arrays."""
        records = self._files.read(shard, rows)
        if self._options.decode is None:
            return self._unpacked(shard, rows, records)
        try:
            return _decoded_by(self._options.decode, records)
        except Exception as error:
            raise self._failed(shard, rows, records, error) from error

    def _unpacked(self, shard: int, rows: Indices, records: list[bytes]) -> Any:
        dtype = np.dtype(self._options.dtype)
        lengths = list(map(len, records))
        if lengths.count(dtype.itemsize) < len(lengths):
            bad = next(i for i, length in enumerate(lengths) if length != dtype.itemsize)
            raise self._error(
                shard,
                rows[bad],
                f"every record must have the {dtype.itemsize} bytes of dtype {dtype}, this one has {lengths[bad]} "
                "bytes; declare what it is, or give decode=... where records differ in length",
            )
        array = fields(np.frombuffer(b"".join(records), dtype))
        return self._options.named(array, self._paths[shard])

    def _failed(self, shard: int, rows: Indices, records: list[bytes], error: Exception) -> RowError:
        """The error for a decode that failed: it names the first of these records that cannot be decoded."""
        assert self._options.decode is not None
        message = "decode failed on this record with {}: {}"
        for row, record in zip(rows, records, strict=True):
            try:
                _decoded_by(self._options.decode, [record])
            except Exception as alone:  # noqa: BLE001  # the user's code may raise any type; the caller raises it
                return self._error(shard, row, message.format(type(alone).__name__, alone))
        message = f"decode failed on {len(records)} records from this one on, but on none alone, with {{}}: {{}}"
        return self._error(shard, rows[0], message.format(type(error).__name__, error))

    def _error(self, shard: int, row: int, message: str) -> RowError:
        return self._files.error(shard, row, message)

    def __reduce__(self) -> Any:
        return ArrayRecordSource, (self._paths, self._options, self._files.versions)


def _decoded_by(decode: Decode, records: list[bytes]) -> Any:
    """The decoded records as a tree of arrays. A list of numbers is an array, as in a record of a dataset."""

    def converted(path: Any, value: Any) -> Array:
        name = f"batch{jax.tree_util.keystr(path)}"
        return as_array(name, as_record_leaf(name, value))

    return jax.tree_util.tree_map_with_path(converted, decode(records), is_leaf=is_list)


class ArrayRecordBytes(EncodedRows):
    """An `EncodedSource` over ArrayRecord files, which all stay open.

    Args:
      paths, versions: as of an `ArrayRecordSource`.
      options: how objects in a store are fetched.
    """

    fields = None
    instead = ", or if they have one size, give open_source their dtype"

    def __init__(self, paths: Sequence[str], options: OpenOptions, versions: Versions | None = None) -> None:
        self._options = options
        self._files = _Files(paths, options, versions)
        self._paths = self._files.paths

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return self._files.identity

    def __len__(self) -> int:
        return len(self._files.shards)

    def records(self, rows: Indices) -> Sequence[bytes]:
        """The records of these rows. Raises RowError, FeedError or IndexError as an `EncodedSource` does."""
        found = [b""] * len(rows)
        for shard, records, offsets in self._files.split(rows):
            for offset, record in zip(offsets.tolist(), self._files.read(shard, records), strict=True):
                found[offset] = record
        return found

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._files.shards.of(np.array([row]))[0])]

    def close(self) -> None:
        """Close the files. They are not opened again."""
        self._files.close()

    def __reduce__(self) -> Any:
        return ArrayRecordBytes, (self._paths, self._options, self._files.versions)
