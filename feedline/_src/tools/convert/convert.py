"""`convert`: writes rows as file shards of one format, on one or many machines; checks them, and can resume."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from feedline._src.errors import FeedError
from feedline._src.files.store import is_url
from feedline._src.options import checked_integer
from feedline._src.rows.source import EncodedSource, Indexed, Source
from feedline._src.sources.as_source import as_source
from feedline._src.sources.open_source import open_source
from feedline._src.tools.convert.formats import FormatName, choose_format, open_files, same_rows, sync, write_file
from feedline._src.tools.convert.rows import Rows
from feedline._src.tools.processes import map_in_processes

Map = Callable[[Callable[[int], dict[str, int]], Sequence[int]], Iterable[dict[str, int]]]
"""Like the builtin `map`, but results may arrive in any order."""
_MANIFEST = "conversion.json"
_UNFINISHED = ".unfinished-"  # prefix of the folders in which shards are written
_SHARD_BYTES = 256 << 20
_MOST_SHARDS = 512  # each file of a mapped source takes a descriptor, and 1,024 is a common limit
_CHUNK_BYTES = 8 << 20


def convert(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    format: FormatName | None = None,
    rows_per_shard: int | None = None,
    workers: int = 0,
    map: Map | None = None,
) -> Source | EncodedSource:
    """Write the rows of a source as files, compare them with the source, and open them.

    Row i of the files is row i of the source, with the same shapes and dtypes. Each file is read back, and must
    have the digest of the source's rows. The files are written to `destination`.partial, which is renamed once all
    files are finished. If `convert` was stopped, call it again with the same arguments: finished files are kept.

    Args:
      source: what `feedline.Feed` and `feedline.open_source` take, except for streams, mixtures and ragged rows.
      destination: a new folder, or the result of the same conversion, which is then only opened.
      format: "npy", "array_record", "parquet" or "zarr". None: "npy" for arrays, "array_record" for bytes,
        "parquet" for records of several fields with bytes.
      rows_per_shard: rows of each file; the last file has the rest. None: about 256 MB per file, but more
        if that gave over 512 files.
      workers: processes that convert; the source must be picklable. 0: this process.
      map: replaces `workers`, for example to convert on other machines. It is called like the builtin `map`, with
        a picklable function and the numbers of the shards; results may arrive in any order. All machines must see
        the source and the destination under the same paths.

    Returns:
      The open files.

    Raises:
      ValueError, TypeError: an argument is wrong, the format cannot hold the rows, the destination holds something
        else, or the source has changed since an earlier run.
      FeedError: a row cannot be read, or differs from the source's row when it is read back.
      OSError: a file cannot be written.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> folder = tempfile.mkdtemp()
      >>> np.savez(f"{folder}/rows.npz", x=np.arange(10), y=np.zeros((10, 2)))
      >>> source = convert(f"{folder}/rows.npz", f"{folder}/rows", rows_per_shard=4)
      >>> len(source), source.spec["x"].dtype.name, sorted(os.listdir(f"{folder}/rows"))[:2]
      (10, 'int64', ['conversion.json', 'rows-00000-of-00003.npy'])
    """
    opened = open_any(source)
    try:
        conversion = Conversion.of(opened, destination, format, rows_per_shard)
        for _ in conversion.run(workers, map):
            pass
    finally:
        if opened is not source:
            opened.close()
    return conversion.opened(conversion.destination)  # type: ignore[no-any-return]


def open_any(source: Any) -> Any:
    """Open what `convert` takes, as a `RowSource` or an `EncodedSource`."""
    if isinstance(source, str | bytes | os.PathLike):
        return open_source(source)
    return source if isinstance(source, EncodedSource) else as_source(source)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion of `count` rows writes, and where. It is picklable if its source is.

    Attributes:
      folder: where the shards are written. It is renamed to `destination` at the end.
      rows_per_chunk: rows that are read, written and stored together: a row group, or a chunk of Zarr.
    """

    rows: Rows
    destination: Path
    folder: Path
    format: FormatName
    count: int
    rows_per_shard: int
    rows_per_chunk: int

    @classmethod
    def of(
        cls, source: Any, destination: str | os.PathLike[str], form: str | None, rows_per_shard: int | None
    ) -> Conversion:
        """Prepare the conversion of a source. Reads a few rows of the source, and writes nothing."""
        path = Path(destination)
        if is_url(os.fspath(destination)) or not path.name:
            raise ValueError(
                f"a conversion writes to a new folder on a disk, got {os.fspath(destination)!r}; name a local "
                "folder, which you can copy afterwards"
            )
        if (count := len(source)) == 0:
            raise ValueError("a conversion needs at least one row, got a source without any")
        rows = Rows.of(source)
        chunk = rows.in_bytes(_CHUNK_BYTES)
        if rows_per_shard is None:
            most = max(rows.in_bytes(_SHARD_BYTES), -(-count // _MOST_SHARDS))
            rows_per_shard = -(-most // chunk) * chunk  # whole chunks: a block of `feedline.Blocks` can be one
        shard = min(count, checked_integer("rows_per_shard", rows_per_shard, at_least=1))
        partial = path.with_name(f"{path.name}.partial")
        return cls(rows, path, partial, choose_format(form, rows), count, shard, min(shard, chunk))

    @property
    def shards(self) -> int:
        return -(-self.count // self.rows_per_shard)

    def pattern(self, folder: Path) -> str:
        """The glob of the files in a folder."""
        return os.path.join(glob.escape(os.fspath(folder)), f"*.{self.format}")

    def opened(self, folder: Path) -> Any:
        """The source of all files in a folder."""
        return open_files(self.pattern(folder), self.format, self.rows.dtype)

    def rows_of(self, shard: int) -> range:
        start = shard * self.rows_per_shard
        return range(start, min(self.count, start + self.rows_per_shard))

    def name_of(self, shard: int) -> str:
        """The name of a shard's file or folder. Sorted names are in the order of the rows."""
        digits = max(5, len(str(self.shards)))
        return f"rows-{shard:0{digits}}-of-{self.shards:0{digits}}.{self.format}"

    def run(self, workers: int = 0, map: Map | None = None) -> Generator[int]:
        """Convert shard by shard. Yields the number of finished shards, at first the number from earlier calls."""
        checked_integer("workers", workers, at_least=0)
        if map is not None and workers:
            raise ValueError(
                f"map converts the shards in place of worker processes, got map and workers={workers}; omit one"
            )
        if (map is not None or workers) and not self.rows.source.picklable:
            raise TypeError(
                "other processes cannot read arrays in the memory of this one; omit workers and map, or pass a "
                "source of files"
            )
        description = self._description()
        if os.path.lexists(self.destination):
            _check_same(self.destination, description)
            self._check_files(self.destination)
            yield self.shards
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _MANIFEST).open("a") as manifest:
            self._lock(manifest)
            written = os.fstat(manifest.fileno()).st_size  # tell() gives the size from before the lock
            if written or any(self.folder.glob("rows-*")):  # files without a manifest may be of any source
                _check_same(self.folder, description)
            else:
                manifest.write(json.dumps(description))
                manifest.flush()
                sync(self.folder / _MANIFEST)
            self._remove_unfinished()
            missing = [i for i in range(self.shards) if not (self.folder / self.name_of(i)).exists()]
            done = self.shards - len(missing)
            yield done
            run = functools.partial(map_in_processes, workers=workers) if workers else map or builtins.map
            try:
                for _ in run(self.convert_shard, missing) if missing else ():
                    done += 1
                    yield done
            finally:
                self._remove_unfinished()
            self._check_files(self.folder)
            os.rename(self.folder, self.destination)
            sync(self.destination.parent)

    def convert_shard(self, shard: int) -> dict[str, int]:
        """Write a shard, read it back, and return {"rows": how many}, since Ray Data accepts no bare number.

        The shard appears under its name once it is on the disk and checked. Several processes may write the same
        shard: their files hold the same rows, so any file may replace another.
        """
        final, rows = self.folder / self.name_of(shard), self.rows_of(shard)
        try:
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.folder) as folder:
                path = Path(folder, final.name)
                write_file(path, self.format, self.rows, rows, self.rows_per_chunk)
                try:
                    os.replace(path, final)
                except OSError:
                    if not final.is_dir():  # a folder cannot be replaced, and this one holds the same rows
                        raise
        except (OSError, ValueError, RuntimeError) as error:  # what libraries raise for a full disk
            full = os.strerror(errno.ENOSPC)
            if isinstance(error, FeedError) or full not in str(error):  # FeedError: the source could not be read
                raise
            size = f"{len(rows)} rows, about {len(rows) * self.rows.row_bytes / 1e6:,.1f} MB"
            message = f"{full} for a file of {size}; finished files are kept, so free some space and convert again"
            raise OSError(errno.ENOSPC, message, str(self.folder)) from error
        sync(self.folder)
        return {"rows": len(rows)}

    def _description(self) -> dict[str, Any]:
        """JSON values of this conversion. A later run keeps finished files only if its values are the same."""
        source = self.rows.source
        files = _state_of_files(source)  # first: `identity` then refuses files replaced since they were opened
        sampled = hashlib.sha256()  # the identity of a source does not include its decoder
        for row in sorted({0, self.count // 2, self.count - 1}):
            next(self.rows.chunks(range(row, row + 1), 1, sampled))
        return {
            "version": 3,
            "format": self.format,
            "rows": self.count,
            "rows_per_shard": self.rows_per_shard,
            "dtype": str(self.rows.dtype),
            "data": hashlib.sha256(json.dumps(source.identity, sort_keys=True).encode()).hexdigest(),
            "sampled_rows": sampled.hexdigest(),
            "files": files,
        }

    def _lock(self, manifest: Any) -> None:
        """Lock the conversion until the manifest is closed, or this process ends, even by SIGKILL."""
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"only one process at a time may run a conversion into {self.folder}, and another one is "
                "running; wait for it, or choose another destination"
            ) from None
        if os.path.lexists(self.destination):  # the previous holder of the lock has renamed the folder
            raise ValueError(
                f"another process has just finished the conversion into {self.destination}; convert again to "
                "open the result"
            )

    def _check_files(self, folder: Path) -> None:
        """Open the files by one glob, as a user does, and compare the number and the leaves of their rows."""
        with contextlib.closing(self.opened(folder)) as written:
            same_rows(written, self.rows.dtype, self.count)

    def _remove_unfinished(self) -> None:
        for left in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


_REASONS = {
    "data": "the data of the source differ",
    "sampled_rows": "the source gives other values for its first, middle or last row",
    "files": "a file of the source has another size or time of modification",
}


def _check_same(folder: Path, here: dict[str, Any]) -> None:
    """Refuse a folder that holds anything but this conversion. The error names the fields that differ."""
    try:
        there = json.loads((folder / _MANIFEST).read_text())
        differing = [
            _REASONS.get(name, f"{name} was {there.get(name)} and is now {value}")
            for name, value in here.items()
            if there.get(name) != value
        ]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        differing = [f"{folder / _MANIFEST} cannot be read: {error}"]
    if differing:
        raise ValueError(
            f"{folder} must be a new folder, or hold the same conversion of the same source: "
            f"{'; '.join(differing)}. Choose another destination, or delete this folder"
        )


def _state_of_files(source: Any) -> str | None:
    """A digest of names, sizes and times of the source's files; None: some rows are not in local files."""
    source = getattr(source, "encoded", source)  # of a decoder, the source that it decodes
    paths = list(source.files or ()) if isinstance(source, Indexed) else []
    if not paths or not all(map(os.path.exists, paths)):
        return None
    walks = (walk for path in paths for walk in os.walk(path, followlinks=True))
    inside = [os.path.join(folder, name) for folder, _, names in walks for name in names]
    states = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted([*paths, *inside])]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()
