"""What a conversion writes: rows and names of the shards, and what tells it from other conversions."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from feedline._src.options import checked_integer
from feedline._src.tools.convert.columns import RowReader, reader_of
from feedline._src.tools.convert.comparison import Digest
from feedline._src.tools.convert.formats import FormatName, check_format, default_format, open_line, open_options

_SHARD_BYTES = 256 << 20
_MOST_SHARDS = 512  # each file of a mapped source takes a descriptor, and 1,024 is a common limit
_CHUNK_BYTES = 8 << 20
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion. Each file shard, here called shard, is written by one call. It pickles if its source does.

    Attributes:
      reader: of the source.
      destination: the folder of the result.
      format: of the files.
      rows: of the source.
      rows_per_shard: of all shards but the last.
    """

    reader: RowReader
    destination: str
    format: FormatName
    rows: int
    rows_per_shard: int

    @classmethod
    def of(cls, source: Any, destination: str, form: str | None, rows_per_shard: int | None) -> Plan:
        """The plan for a source. None: the default format, the default size.

        Raises:
          ValueError, TypeError: there are no rows, the format cannot hold them, or an argument is wrong.
          FeedError: the first rows cannot be read.
        """
        if (rows := len(source)) == 0:
            raise ValueError(f"a conversion needs at least one row, got an empty {type(source).__name__}")
        reader = reader_of(source)
        checked = default_format(reader.kinds) if form is None else check_format(form, reader.kinds)
        if rows_per_shard is None:
            chunk = rows_of_bytes(_CHUNK_BYTES, reader)
            most = max(rows_of_bytes(_SHARD_BYTES, reader), -(-rows // _MOST_SHARDS))
            rows_per_shard = -(-most // chunk) * chunk  # so that blocks of the order can have the size of a chunk
        checked_integer("rows_per_shard", rows_per_shard, at_least=1)
        return cls(reader, destination, checked, rows, min(rows, rows_per_shard))

    @property
    def folder(self) -> Path:
        """Where the shards are written, until all of them are checked."""
        return Path(f"{self.destination}.partial")

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.rows // self.rows_per_shard)

    @property
    def rows_per_chunk(self) -> int:
        """Rows that are read, written and stored together: a row group, or a chunk of Zarr."""
        return min(self.rows_per_shard, rows_of_bytes(_CHUNK_BYTES, self.reader))

    def rows_of(self, shard: int) -> range:
        """The rows of a shard."""
        start = shard * self.rows_per_shard
        return range(start, min(self.rows, start + self.rows_per_shard))

    def chunks_of(self, shard: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the chunks of a shard, in order, as rows of the source."""
        rows = self.rows_of(shard)
        for start in range(rows.start, rows.stop, self.rows_per_chunk):
            yield start, min(rows.stop, start + self.rows_per_chunk)

    def path_of(self, shard: int) -> Path:
        """The file of a shard, or its folder. Sorted names are in the order of the rows."""
        digits = max(_DIGITS, len(str(self.shards)))
        return self.folder / (f"rows-{shard:0{digits}}-of-{self.shards:0{digits}}.{self.format}")

    @property
    def open_options(self) -> dict[str, Any]:
        """The options of `feedline.open_source` for the files."""
        return open_options(self.format, self.reader.kinds)

    @property
    def open_line(self) -> str:
        """The Python expression that opens the result."""
        return open_line(self.pattern_in(self.destination), self.format, self.reader.kinds)

    def pattern_in(self, folder: str | Path) -> str:
        """The glob that matches the files in a folder."""
        return os.path.join(glob.escape(os.fspath(folder)), f"*.{self.format}")

    def description(self, identity: Any) -> dict[str, Any]:
        """JSON values that must be the same for a rerun to continue the conversion.

        Reads the first, the middle and the last row: the identity of a source does not include its decoder.
        """
        return {
            "version": 1,
            "format": self.format,
            "rows": self.rows,
            "rows_per_shard": self.rows_per_shard,
            "leaves": {name: kind.as_json for name, kind in self.reader.kinds.items()},
            "source": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
            "sampled_rows": self._digest_of(sorted({0, self.rows // 2, self.rows - 1})),
        }

    def _digest_of(self, rows: Sequence[int]) -> str:
        digest = Digest(list(self.reader.kinds))
        for row in rows:
            digest.update(self.reader.read(row, row + 1))
        return digest.hexdigest()


def rows_of_bytes(size: int, reader: RowReader) -> int:
    """How many rows have about this size, at least one."""
    return max(1, size // max(1, reader.row_bytes))
