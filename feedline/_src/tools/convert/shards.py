"""The files of a conversion, here called shards: each is written and read back by one call, on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer
from feedline._src.stores.urls import is_url
from feedline._src.tools.convert.formats import FormatName, choose_format, open_files, sync, write_file
from feedline._src.tools.convert.rows import Rows

UNFINISHED = ".unfinished-"
"""The names of the folders in which shards are written begin with this."""
_SHARD_BYTES = 256 << 20
_MOST_SHARDS = 512  # each file of a mapped source takes a descriptor, and 1,024 is a common limit
_CHUNK_BYTES = 8 << 20
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a conversion writes. It pickles if its source does.

    Attributes:
      rows: of the source.
      destination: the folder of the result.
      folder: where the shards are written, or lie: `destination` if it existed when the plan was made, else
        `destination`.partial. It stays the same when another process makes the destination.
      format: of the files.
      count: how many rows.
      rows_per_shard: of all shards but the last.
    """

    rows: Rows
    destination: Path
    folder: Path
    format: FormatName
    count: int
    rows_per_shard: int

    @classmethod
    def of(
        cls, source: Any, destination: str | os.PathLike[str], form: str | None, rows_per_shard: int | None
    ) -> Plan:
        """The plan for a source. None: the default format, the default size.

        Raises:
          ValueError, TypeError: there are no rows, the format cannot hold them, or an argument is wrong.
          FeedError: the first rows cannot be read.
        """
        if is_url(os.fspath(destination)):
            raise ValueError(
                f"a conversion writes to a folder on a disk, got {destination}; convert to a local folder, and "
                "copy it there"
            )
        if (count := len(source)) == 0:
            raise ValueError(f"a conversion needs at least one row, got an empty {type(source).__name__}")
        if rows_per_shard is not None:
            checked_integer("rows_per_shard", rows_per_shard, at_least=1)
        rows = Rows.of(source)
        if rows_per_shard is None:
            chunk = _rows_of_bytes(_CHUNK_BYTES, rows)
            most = max(_rows_of_bytes(_SHARD_BYTES, rows), -(-count // _MOST_SHARDS))
            rows_per_shard = -(-most // chunk) * chunk  # so that blocks of the order can have the size of a chunk
        chosen, final = choose_format(form, rows), Path(destination)
        folder = final if os.path.lexists(final) else final.with_name(f"{final.name}.partial")
        return cls(rows, final, folder, chosen, count, min(count, rows_per_shard))

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.count // self.rows_per_shard)

    @property
    def rows_per_chunk(self) -> int:
        """Rows that are read, written and stored together: a row group, or a chunk of Zarr."""
        return min(self.rows_per_shard, _rows_of_bytes(_CHUNK_BYTES, self.rows))

    def rows_of(self, shard: int) -> range:
        """The rows of a shard."""
        start = shard * self.rows_per_shard
        return range(start, min(self.count, start + self.rows_per_shard))

    def rows_in(self, shards: Sequence[int]) -> int:
        """How many rows some shards have."""
        return sum(len(self.rows_of(shard)) for shard in shards)

    def path_of(self, shard: int) -> Path:
        """The file of a shard, or its folder. Sorted names are in the order of the rows."""
        digits = max(_DIGITS, len(str(self.shards)))
        return self.folder / (f"rows-{shard:0{digits}}-of-{self.shards:0{digits}}.{self.format}")

    def pattern(self, folder: Path) -> str:
        """The glob that matches all files in `folder` or, once the result is finished, in `destination`."""
        return os.path.join(glob.escape(os.fspath(folder)), f"*.{self.format}")

    def opened(self, folder: Path) -> Any:
        """The source of all files that `pattern` matches. Raises as `feedline.open_source`."""
        return open_files(self.pattern(folder), self.format, self.rows.dtype)

    def description(self, identity: Any) -> dict[str, Any]:
        """JSON values that must be the same for a rerun to continue the conversion.

        Reads the first, the middle and the last row: the identity of a source does not include its decoder.
        """
        sampled = hashlib.sha256()
        for row in sorted({0, self.count // 2, self.count - 1}):
            next(self.rows.chunks(range(row, row + 1), 1, sampled))
        return {
            "version": 2,
            "format": self.format,
            "rows": self.count,
            "rows_per_shard": self.rows_per_shard,
            "row_bytes": self.rows.row_bytes,
            "leaves": [["/".join(leaf), str(dtype)] for leaf, dtype in self.rows.leaves],
            "source": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
            "sampled_rows": sampled.hexdigest(),
        }


def _rows_of_bytes(size: int, rows: Rows) -> int:
    """How many rows have about this size, at least one."""
    return max(1, size // max(1, rows.row_bytes))


def convert_shard(plan: Plan, shard: int) -> dict[str, Any]:
    """Write a shard, read it back, and return {"shard": its number, "digest": of its rows in the source}.

    The shard appears under its name once it is on the disk and checked. Several processes may write the same one:
    the last one replaces it by the same rows.

    Raises:
      FeedError: a row cannot be read, or the file does not hold the rows that were written.
      OSError: it cannot be written.
    """
    final = plan.path_of(shard)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=plan.folder) as folder, _full_disk_named(plan):
        path = Path(folder, final.name)
        digest = write_file(path, plan.format, plan.rows, plan.rows_of(shard), plan.rows_per_chunk)
        if final.is_dir():  # a folder cannot be replaced
            shutil.rmtree(final)
        os.replace(path, final)
    sync(plan.folder)
    return {"shard": shard, "digest": digest}


def digest_shard(plan: Plan, shard: int) -> dict[str, Any]:
    """Read the rows of a shard from the source alone, and return what `convert_shard` returns.

    Raises:
      FeedError: a row cannot be read.
    """
    hashed = hashlib.sha256()
    for _ in plan.rows.chunks(plan.rows_of(shard), plan.rows_per_chunk, hashed):
        pass
    return {"shard": shard, "digest": hashed.hexdigest()}


@contextlib.contextmanager
def _full_disk_named(plan: Plan) -> Iterator[None]:
    """Turn the errors that libraries raise for a full disk into one that says what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, FeedError) or full not in str(error):
            raise
        size = plan.rows_per_shard * plan.rows.row_bytes / 1e6
        raise OSError(
            errno.ENOSPC,
            f"{full} for the next file of {plan.rows_per_shard} rows, about {size:,.1f} MB; finished files are "
            "kept, so free some space and run the conversion again",
            str(plan.folder),
        ) from error
