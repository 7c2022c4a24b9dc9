"""ArrayRecord files: records of bytes, read and decoded many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_array, as_record_leaf, is_list
from feedline._src.sources.formats import files as file_fields
from feedline._src.sources.formats.array_record_files import ArrayRecordFiles
from feedline._src.sources.formats.open_options import Decode, OpenOptions
from feedline._src.sources.formats.versioned_files import Versions

Array = npt.NDArray[Any]
SUFFIXES = (".array_record", ".arrayrecord")


class ArrayRecordSource(IndexedSource):
    """A `RowSource` over ArrayRecord files.

    Reads are thread-safe. Records are read in the order of the file, and then written to their offsets.

    Args:
      paths: of the files, whose records follow each other.
      options: `dtype` for records of one size, or `decode` for others.
      files: the same, open.

    Raises:
      ValueError: no records, not an ArrayRecord file, or not exactly one of `dtype` and `decode`.
      RowError: the first record does not have that dtype, or cannot be decoded.
    """

    def __init__(self, paths: Sequence[str], options: OpenOptions, files: ArrayRecordFiles | None = None) -> None:
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
        self._files = files if files is not None else ArrayRecordFiles(paths, options.store)
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
        array = file_fields.fields(np.frombuffer(b"".join(records), dtype))
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
        return _opened_again, (self._paths, self._options, self._files.versions)


def _decoded_by(decode: Decode, records: list[bytes]) -> Any:
    """The decoded records as a tree of arrays. A list of numbers is an array, as in a record of a dataset."""

    def converted(path: Any, value: Any) -> Array:
        name = f"batch{jax.tree_util.keystr(path)}"
        return as_array(name, as_record_leaf(name, value))

    return jax.tree_util.tree_map_with_path(converted, decode(records), is_leaf=is_list)


def _opened_again(paths: Sequence[str], options: OpenOptions, versions: Versions) -> ArrayRecordSource:
    """A copy of a source that another process has open. FeedError if a file has changed since."""
    return ArrayRecordSource(paths, options, ArrayRecordFiles(paths, options.store, versions))
