"""`convert`: rows as files of one format, in shards that any machine can write, checked and resumable."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain

from feedline._src.errors import FeedError
from feedline._src.files.store import is_url
from feedline._src.options import checked_integer
from feedline._src.rows.encoded_source import EncodedRows, is_encoded_source
from feedline._src.rows.indexed import IndexedSource
from feedline._src.sources.lanes import Lanes
from feedline._src.sources.open_source import as_source, open_source
from feedline._src.tools.convert.formats import FormatName, choose_format, open_files, same_rows, sync, write_file
from feedline._src.tools.convert.manifest import NAME, Manifest, state_of_files
from feedline._src.tools.convert.processes import mapped_in_processes
from feedline._src.tools.convert.rows import Rows

Map = Callable[[Callable[[int], dict[str, Any]], Sequence[int]], Iterable[dict[str, Any]]]
"""Like the builtin `map`, but results may come in any order."""
_UNFINISHED = ".unfinished-"
"""The names of the folders in which shards are written begin with this."""
_SHARD_BYTES = 256 << 20
_MOST_SHARDS = 512  # each file of a mapped source takes a descriptor, and 1,024 is a common limit
_CHUNK_BYTES = 8 << 20
_DIGITS = 5


class Progress(NamedTuple):
    """How far a stage of a conversion is: `rows` of `total` are done.

    Attributes:
      stage: "keep": rows of finished files whose source files are unchanged. "compare": other rows of finished
        files, which are read again from the source, but not from the files. "convert": rows that are written and
        read back.
    """

    stage: Literal["keep", "compare", "convert"]
    rows: int
    total: int


def convert(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    format: FormatName | None = None,
    rows_per_shard: int | None = None,
    workers: int = 0,
    map: Map | None = None,
) -> IndexedSource | EncodedRows:
    """Write the rows of a source as files, compare them with the source, and open them.

    Row i of the files is row i of the source, with the same shapes and dtypes. Each file is read back, and must
    have the digest of the source's rows. The files are written to `destination`.partial, which is renamed once all
    are finished. If a run ends before that, call `convert` again with the same arguments: finished files are kept
    without reading them again. Their rows are read from the source again, which must still have the rows that were
    converted, unless size and times of all its files are unchanged.

    Args:
      source: what `feedline.Feed` and `feedline.open_source` take, except for streams, mixtures and ragged rows.
      destination: a new folder.
      format: "npy", "array_record", "parquet" or "zarr". None: "npy" for arrays, "array_record" for bytes,
        "parquet" for records of several fields with bytes.
      rows_per_shard: rows of each file; the last has the rest. None: files of about 256 MB, 512 at most.
      workers: processes that convert; the source must pickle. 0: this process.
      map: what runs the shards in place of `workers`, on other machines for example: it is called as the builtin
        `map`, with a picklable function and the numbers of the shards; results may come in any order. All machines
        must see the source and the destination under the same paths.

    Returns:
      The open files.

    Raises:
      ValueError, TypeError: an argument is wrong, the format cannot hold the rows, the destination holds something
        else, or the source has changed since an earlier run.
      FeedError: a row cannot be read, or is not the source's when it is read back.
      OSError: a file cannot be written.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> folder = tempfile.mkdtemp()
      >>> np.savez(f"{folder}/rows.npz", x=np.arange(10), y=np.zeros((10, 2)))
      >>> source = convert(f"{folder}/rows.npz", f"{folder}/rows", rows_per_shard=4)
      >>> len(source), source.spec["x"].dtype.name, sorted(os.listdir(f"{folder}/rows"))[:2]
      (10, 'int64', ['conversion.jsonl', 'rows-00000-of-00003.npy'])
    """
    opened = open_any(source)
    try:
        conversion = Conversion.of(opened, destination, format, rows_per_shard)
        for _ in conversion.run(opened, workers, map):
            pass
    finally:
        if opened is not source:
            opened.close()
    return conversion.opened(conversion.destination)  # type: ignore[no-any-return]


def open_any(source: Any) -> Any:
    """The `RowSource` or `EncodedSource` for what `convert` takes.

    Raises:
      TypeError: it has no rows with random access.
    """
    if isinstance(source, str | bytes | os.PathLike):
        return open_source(source)
    if is_encoded_source(source):
        return source
    opened = as_source(source)
    if isinstance(opened, grain.IterDataset | Lanes):
        raise TypeError(
            f"a conversion reads rows by their numbers, got the stream {type(opened).__name__}; convert what the "
            "stream reads from"
        )
    return opened


def _remove_unfinished(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion writes. It pickles if its source does.

    Attributes:
      rows: of the source.
      destination: the folder of the result.
      folder: where the shards are written, or lie: `destination` if it existed when it was planned, else
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
    ) -> Conversion:
        """Plan the conversion of a source. None: the default format, the default size.

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

    def run(self, source: Any, workers: int = 0, map: Map | None = None) -> Generator[Progress]:
        """Convert in steps, with the progress after each shard. The arguments are those of `convert`."""
        checked_integer("workers", workers, at_least=0)
        if map is not None and workers:
            raise ValueError(f"map runs the shards in place of worker processes, got both and workers={workers}")
        if (map is not None or workers) and not getattr(source, "picklable", True):
            raise TypeError(
                "other processes cannot read arrays in the memory of this one; convert with workers=0, or pass a "
                "source of files"
            )
        files, folder = state_of_files(source), self.folder
        if folder == self.destination and not (folder / NAME).is_file():
            raise ValueError(
                f"the destination must be a new folder or the result of the same conversion, and {folder} exists "
                "and is neither; choose another one"
            )
        with Manifest(folder, self.destination, self.description(source.identity)) as manifest:
            _remove_unfinished(folder)
            try:
                pool = mapped_in_processes(workers) if workers else contextlib.nullcontext(map or builtins.map)
                with pool as run:
                    yield from self._steps(manifest, files, run)
            finally:
                _remove_unfinished(folder)
            with contextlib.closing(self.opened(folder)) as written:  # by one glob, as a user does
                same_rows(written, self.rows.dtype, self.count)
            if not manifest.finished:
                os.rename(folder, self.destination)
                sync(self.destination.parent)

    def _steps(self, manifest: Manifest, files: str | None, run: Map) -> Iterator[Progress]:
        """Compare the shards of earlier runs with the source, where it may have changed, and convert all others.

        Args:
          files: the state of the source's files; None: unknown.
        """
        there = {i: shard for i, shard in manifest.shards.items() if self.path_of(i).exists()}
        missing = [i for i in range(self.shards) if i not in there]
        if manifest.finished and missing:
            raise ValueError(
                f"{self.folder} must have all files of the result, and {self.path_of(missing[0]).name} is "
                f"missing; delete the folder, or rename it to {self.folder}.partial to keep its files, and "
                "convert again"
            )
        kept = [i for i, shard in there.items() if files is not None and shard.get("files") == files]
        yield Progress("keep", self.rows_in(kept), self.rows_in(kept))
        stages: dict[Literal["compare", "convert"], tuple[Callable[[int], dict[str, Any]], list[int]]] = {
            "compare": (self.digest_shard, [i for i in there if i not in kept]),
            "convert": (self.convert_shard, missing),
        }
        for stage, (call, shards) in stages.items():
            if not shards:
                continue
            rows, total, left = 0, self.rows_in(shards), set(shards)
            yield Progress(stage, rows, total)
            for result in run(call, shards):
                i = result["shard"]
                if i not in left:
                    raise _wrong_map(f"got that of {self.path_of(i).name} again")
                left.remove(i)
                if i in there and result["digest"] != there[i]["digest"]:
                    raise self._changed_source(i, finished=manifest.finished)
                line = {**result, "files": files}
                if not manifest.finished and line != there.get(i):
                    manifest.add(line)
                rows += self.rows_in([i])
                yield Progress(stage, rows, total)
            if left:
                raise _wrong_map(f"lost those of {len(left)} of {len(shards)} files")

    def _changed_source(self, shard: int, *, finished: bool) -> ValueError:
        at, name = self.rows_of(shard), self.path_of(shard).name
        remedy = "" if finished else "this file, or to convert all rows again "
        return ValueError(
            f"the source must still have the rows that an earlier run converted, and rows {at.start} to "
            f"{at.stop - 1} of the source differ from those of {name}: it has changed, or gives other values each "
            f"time; delete {remedy}{self.folder}, and run the conversion again"
        )

    def convert_shard(self, shard: int) -> dict[str, Any]:
        """Write a shard, read it back, and return {"shard": its number, "digest": of its rows in the source}.

        The shard appears under its name once it is on the disk and checked. Several processes may write the same
        one: the last one replaces it by the same rows.

        Raises:
          FeedError: a row cannot be read, or the file does not hold the rows that were written.
          OSError: it cannot be written.
        """
        final = self.path_of(shard)
        with (
            tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.folder) as folder,
            self._full_disk_named(),
        ):
            path = Path(folder, final.name)
            digest = write_file(path, self.format, self.rows, self.rows_of(shard), self.rows_per_chunk)
            if final.is_dir():  # a folder cannot be replaced
                shutil.rmtree(final)
            os.replace(path, final)
        sync(self.folder)
        return {"shard": shard, "digest": digest}

    def digest_shard(self, shard: int) -> dict[str, Any]:
        """Read the rows of a shard from the source alone, and return what `convert_shard` returns.

        Raises:
          FeedError: a row cannot be read.
        """
        hashed = hashlib.sha256()
        for _ in self.rows.chunks(self.rows_of(shard), self.rows_per_chunk, hashed):
            pass
        return {"shard": shard, "digest": hashed.hexdigest()}

    @contextlib.contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        """Turn the errors that libraries raise for a full disk into one that says what to do."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            full = os.strerror(errno.ENOSPC)
            if isinstance(error, FeedError) or full not in str(error):
                raise
            size = self.rows_per_shard * self.rows.row_bytes / 1e6
            raise OSError(
                errno.ENOSPC,
                f"{full} for the next file of {self.rows_per_shard} rows, about {size:,.1f} MB; finished files "
                "are kept, so free some space and run the conversion again",
                str(self.folder),
            ) from error


def _rows_of_bytes(size: int, rows: Rows) -> int:
    """How many rows have about this size, at least one."""
    return max(1, size // max(1, rows.row_bytes))


def _wrong_map(found: str) -> ValueError:
    return ValueError(
        f"map must return the result of each call once, and {found}; mend the function that was passed as map"
    )
