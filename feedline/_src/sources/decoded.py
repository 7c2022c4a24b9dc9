"""Decodes records: a decoder writes each encoded record into its place in the batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.order.epoch import keys_at
from feedline._src.rows.source import EncodedSource, Indices, Record, Rows, Source, WillRead
from feedline._src.rows.spec import RowSpec
from feedline._src.sources.open_source import open_source

_RECORDS_AT_ONCE = 64  # read in one call; all of them are in memory then, in addition to the batch


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Which row is decoded, and where it stands in the order.

    Attributes:
      index: its row index in the source.
      epoch, position: the epoch, and the row's position in the epoch's order.
      key: 64 random bits, computed from (seed, epoch, position). So random numbers drawn from the key are the same
        on any topology and after any resume.
    """

    index: int
    epoch: int
    position: int
    key: int


Decode = Callable[[Any, Any, Row], None]
"""(record, out, row): writes one row into `out`, a tree of NumPy arrays with the shapes of the spec."""


def decoded(source: EncodedSource | str | os.PathLike[str], decode: Decode, spec: Any) -> DecodedSource:
    """Makes rows of encoded records. Each record is decoded straight into its place in the batch.

    Several threads call `decode(record, out, row)` at once. A decoder that releases the GIL scales with
    `Reading.threads`; for one that does not, use `Reading.workers`.

    Args:
      source: what `open_source` returns for files of encoded records, or a path that `open_source` takes.
      decode: writes one row into `out`: a tree like `spec`, of writable NumPy arrays. A leaf without axes is
        written by `out["label"][...] = 3`. `decode` must write every element, draw random numbers from `row.key`
        alone, and return None. An error that it raises makes the row bad. With workers, `decode` must pickle.
      spec: a tree of `jax.ShapeDtypeStruct` for one row.

    Returns:
      A `RowSource`. Closing it closes `source`.

    Raises:
      TypeError: `source` has no encoded records, or `spec` is not a tree of shapes and dtypes.
      ValueError: `decode` leaves a part of a row unwritten, or writes other values when it is called again.
      RowError: decoding fails for the first, the middle and the last record.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> folder = Path(tempfile.mkdtemp())
      >>> for i in range(3):
      ...     _ = (folder / f"{i}.txt").write_bytes(b"ab" * i)
      >>> def decode(record, out, row):
      ...     out["length"][...] = len(record)
      >>> source = decoded(folder, decode, {"length": jax.ShapeDtypeStruct((), np.int32)})
      >>> source[2]
      {'length': np.int32(4)}
    """
    opened = open_source(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(opened, EncodedSource):
        kind = type(opened).__name__
        raise TypeError(
            f"decoded needs encoded records, got {kind}; open a folder of files, or a file of records, with "
            "open_source. To change rows that are arrays already, use Feed(transform=...)"
        )
    rows = DecodedSource(opened, decode, spec)
    _check_decoder(rows)
    return rows


class DecodedSource(Source):
    """A `RowSource` over encoded records. See `decoded`.

    Attributes:
      encoded: the source of the records.
      decode: writes one record into its place in the batch.
    """

    positioned = True

    def __init__(self, source: EncodedSource, decode: Decode, spec: Any) -> None:
        self.encoded, self.decode = source, decode
        self.picklable, self._paths = source.picklable, source._paths
        self._spec = RowSpec.of(spec)
        self.spec = self._spec.structs

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the records. The decoder, like a transform, is not part of it."""
        return {"kind": "decoded", "records": self.encoded.identity}

    def __len__(self) -> int:
        return len(self.encoded)

    def read(self, rows: Indices, out: Any) -> None:
        """Decode record rows[i] into index i of each leaf of `out`, as in epoch 0 without shuffling.

        Raises:
          RowError: a record cannot be read or decoded.
        """
        self.read_positioned(Rows(np.zeros_like(rows), rows, rows, keys_at(0, 0, rows)), out)

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Decode the records `rows.index` with these epochs, positions and keys. Raises what `read` raises."""
        targets = jax.tree_util.tree_leaves(out)
        columns = (rows.index.tolist(), rows.epoch.tolist(), rows.position.tolist(), rows.key.tolist())
        places = [Row(*each) for each in zip(*columns, strict=True)]
        for start in range(0, len(places), _RECORDS_AT_ONCE):
            records = self.encoded.records(rows.index[start : start + _RECORDS_AT_ONCE])
            for i, record in enumerate(records, start):
                self._decode(record, self._spec.tree([leaf[i, ...] for leaf in targets]), places[i])

    def _decode(self, record: Record, out: Any, row: Row) -> None:
        try:
            returned: Any = self.decode(record, out, row)
            if returned is not None:
                raise TypeError(f"decode writes its row into out, and must not return a {type(returned).__name__}")
        except FeedError:
            raise
        except Exception as error:  # of any type, even StopIteration, which would look like the end of the feed
            raise RowError(
                f"decode failed on this record with {type(error).__name__}: {error}",
                stage="read",
                row=row.index,
                file=self.encoded.file_of(row.index),
            ) from error

    @property
    def will_read(self) -> WillRead | None:
        """Fetches records from a store ahead of their reads; None for local files."""
        return self.encoded.will_read

    def file_of(self, row: int) -> str | None:
        """The file that holds the row."""
        return self.encoded.file_of(row)

    def close(self) -> None:
        """Close the source of the records."""
        self.encoded.close()

    def check_rows(self) -> None:
        """See `Indexed.check_rows`. Checks the records."""
        self.encoded.check_rows()

    def __reduce__(self) -> Any:
        return DecodedSource, (self.encoded, self.decode, self.spec)


def _check_decoder(source: DecodedSource) -> None:
    """Decode one record twice, into bytes of 0x00 and of 0xFF, and compare the results. Tries up to three records.

    Raises:
      ValueError: the results differ.
      RowError: none of three records can be decoded.
    """
    failure: RowError | None = None
    for row in sorted({0, len(source) // 2, len(source) - 1}):
        try:
            over_zeros, over_ones = _decoded_over(source, row, 0x00), _decoded_over(source, row, 0xFF)
            break
        except RowError as error:
            failure = failure or error
    else:
        assert failure is not None  # no source is empty
        raise failure
    for leaf, first, second in zip(source._spec.leaves, over_zeros, over_ones, strict=True):
        differs = first != second
        if not differs.any():
            continue
        found, change = "wrote other values when it was called again", "draw random numbers from row.key alone"
        if not first[differs].any() and (second[differs] == 0xFF).all():
            found, change = "leaves a part unwritten", "fill the rest with zeros"
        raise ValueError(
            "decode must write every element of a row, and the same values each time it gets the same record and "
            f"row; for row {row} it {found}, in {leaf.name}; {change}"
        )


def _decoded_over(source: DecodedSource, row: int, byte: int) -> list[Any]:
    """Decode a row into memory that is filled with `byte`. Returns the bytes of each leaf."""
    leaves = [np.empty((1, *leaf.shape), leaf.dtype) for leaf in source._spec.leaves]
    memory = [leaf.reshape(-1).view(np.uint8) for leaf in leaves]
    for each in memory:
        each[...] = byte
    source.read(np.array([row], np.int64), source._spec.tree(leaves))
    return memory
