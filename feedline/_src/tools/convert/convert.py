"""`convert`: the rows of a source as files of one format, resumable and checked."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer
from feedline._src.rows.indexed import IndexedSource
from feedline._src.sources.encoded.encoded_rows import EncodedRows
from feedline._src.sources.encoded.records import is_encoded_source
from feedline._src.sources.lanes import Lanes
from feedline._src.sources.open_source import as_source, open_source
from feedline._src.stores.urls import is_url
from feedline._src.tools.convert.columns import reader_of
from feedline._src.tools.convert.formats import FormatName
from feedline._src.tools.convert.manifest import NAME, Manifest, Shards, check_same, read_lines, shards_in
from feedline._src.tools.convert.plan import Plan
from feedline._src.tools.convert.processes import mapped_in_processes
from feedline._src.tools.convert.shards import UNFINISHED, check_shard, convert_shard, digest_shard, sync
from feedline._src.tools.convert.source_files import state_of_files

Map = Callable[[Callable[[int], dict[str, Any]], Sequence[int]], Iterable[dict[str, Any]]]
"""As the builtin `map`, but results may come in any order."""


class Progress(NamedTuple):
    """How far a conversion is: `rows` of `total` are done in this stage.

    Attributes:
      stage: "keep" tells once how many rows of an earlier run are kept without reading the source; "compare" reads
        the source's rows again that an earlier run converted; "convert" counts all that are converted; "check"
        reads the files back. A finished result has neither of the last two.
    """

    stage: Literal["keep", "compare", "convert", "check"]
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

    Row i of the files is row i of the source, with the same shapes and dtypes. The files are written to
    `destination`.partial, which is renamed once all rows have been read back and have the digests of the source's
    rows. If a run ends before that, call `convert` again with the same arguments: finished files are kept. Their
    rows are compared with those of the source again, unless the source's files have the sizes and times of then.

    Args:
      source: what `feedline.Feed` and `feedline.open_source` take, except for streams, mixtures and ragged rows.
      destination: a new folder.
      format: "npy", "array_record", "parquet" or "zarr". None: "npy" for arrays, "array_record" for bytes,
        "parquet" for records of several fields with bytes.
      rows_per_shard: rows of each file; the last has the rest. None: files of about 256 MB, 512 at most.
      workers: processes that convert and check shards; the source must pickle. 0: this process.
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
        plan = Plan.of(opened, checked_destination(destination), format, rows_per_shard)
        for _ in converting(plan, opened, workers, map):
            pass
    finally:
        if opened is not source:
            opened.close()
    return open_source(plan.pattern_in(plan.destination), **plan.open_options)


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


def converting(plan: Plan, source: Any, workers: int = 0, map: Map | None = None) -> Generator[Progress]:
    """The steps of `convert`, which reports its progress after each shard.

    Args:
      source: of the plan.
    """
    _check_processes(source, workers, map)
    files = state_of_files(source)
    description = plan.description(source.identity)
    destination = Path(plan.destination)
    if os.path.lexists(destination):
        finished = _finished(plan, description)
        remedy = f"delete {destination}, or choose another destination"
        with _runner(workers, map) as run:
            yield from _compared(plan, finished, files, run, remedy)
        _check_whole(plan, destination, f"delete {destination}")
        return
    with Manifest(plan.folder, description) as manifest, _runner(workers, map) as run:
        _remove_unfinished(plan.folder)
        there = {i: shard for i, shard in manifest.shards.items() if plan.path_of(i).exists()}
        remedy = f"delete this file, or {plan.folder} to convert all rows again"
        try:
            yield from _compared(plan, there, files, run, remedy, manifest)
            yield from _written(plan, [i for i in range(plan.shards) if i not in there], files, run, manifest)
            yield from _checked(plan, manifest, run)
        finally:
            _remove_unfinished(plan.folder)
        _check_whole(plan, plan.folder, f"take foreign files out of {plan.folder}")
        os.rename(plan.folder, destination)
        sync(plan.folder.parent)


def _compared(
    plan: Plan, shards: Shards, files: str | None, run: Map, remedy: str, manifest: Manifest | None = None
) -> Iterator[Progress]:
    """Compare the source with what an earlier run converted, where its files do not show that it is the same.

    Args:
      files: their state now; None: unknown.
      manifest: notes what was compared.
    """
    unknown = [i for i, shard in shards.items() if files is None or shard.get("files") != files]
    total = sum(len(plan.rows_of(i)) for i in unknown)
    yield Progress("keep", sum(len(plan.rows_of(i)) for i in shards) - total, plan.rows)
    rows = 0
    for result in run(functools.partial(digest_shard, plan), unknown) if unknown else ():
        i = result["shard"]
        if result["digest"] != shards[i]["digest"]:
            at = plan.rows_of(i)
            raise ValueError(
                "the source must still have the rows that an earlier run converted, and rows "
                f"{at.start} to {at.stop - 1} of the source differ from those of {plan.path_of(i).name}: it has "
                f"changed, or gives other values each time; {remedy}, and run the conversion again"
            )
        if manifest is not None and files is not None:
            manifest.add({**result, "files": files})
        rows += len(plan.rows_of(i))
        yield Progress("compare", rows, total)
    _check_complete(rows, total)


def _written(
    plan: Plan, missing: Sequence[int], files: str | None, run: Map, manifest: Manifest
) -> Iterator[Progress]:
    """Convert the shards that are not there."""
    rows = plan.rows - sum(len(plan.rows_of(i)) for i in missing)
    yield Progress("convert", rows, plan.rows)
    for result in run(functools.partial(convert_shard, plan), missing):
        manifest.add({**result, "files": files})
        rows += len(plan.rows_of(result["shard"]))
        yield Progress("convert", rows, plan.rows)
    _check_complete(rows, plan.rows)


def _checked(plan: Plan, manifest: Manifest, run: Map) -> Iterator[Progress]:
    """Read all shards back, and compare their digests."""
    rows = 0
    digests = {i: shard["digest"] for i, shard in manifest.shards.items()}
    for result in run(functools.partial(check_shard, plan, digests), range(plan.shards)):
        rows += len(plan.rows_of(result["shard"]))
        yield Progress("check", rows, plan.rows)
    _check_complete(rows, plan.rows)


def _check_complete(rows: int, total: int) -> None:
    """Refuse to go on after a `map` that has lost or repeated results."""
    if rows != total:
        raise ValueError(
            f"map must return the result of each call once, got results for {rows} of {total} rows; mend the "
            "function that was passed as map"
        )


def _check_whole(plan: Plan, folder: Path, remedy: str) -> None:
    """Open all files by one glob, as a user does, and compare the leaves and the number of rows."""
    with contextlib.closing(open_source(plan.pattern_in(folder), **plan.open_options)) as written:
        found, expected = reader_of(written).kinds, plan.reader.kinds
        if len(written) != plan.rows or dict(found) != dict(expected):
            raise FeedError(
                f"the files must hold {plan.rows} rows of {dict(expected)}, and there are {len(written)} "
                f"of {dict(found)}; {remedy}, and run the conversion again",
                file=str(folder),
            )


def checked_destination(destination: str | os.PathLike[str]) -> str:
    """The path without a slash at its end. ValueError: it is an address in a store."""
    path = os.fspath(destination)
    if is_url(path):
        raise ValueError(
            f"a conversion writes to a folder on a disk, got {path}; convert to a local folder, and copy it there"
        )
    return os.path.join(os.path.dirname(path.rstrip("/")), os.path.basename(path.rstrip("/")))


def _check_processes(source: Any, workers: int, map: Map | None) -> None:
    """Refuse other processes for a source that only this process can read."""
    checked_integer("workers", workers, at_least=0)
    if map is not None and workers:
        raise ValueError(f"map runs the shards in place of worker processes, got both and workers={workers}")
    if (map is not None or workers) and not getattr(source, "picklable", True):
        raise TypeError(
            "other processes cannot read arrays in the memory of this one; convert with workers=0, or pass a "
            "source of files"
        )


def _runner(workers: int, map: Map | None) -> contextlib.AbstractContextManager[Map]:
    """What runs the shards, within a `with` block."""
    if workers:
        return mapped_in_processes(workers)
    return contextlib.nullcontext(builtins.map if map is None else map)


def _finished(plan: Plan, description: dict[str, Any]) -> Shards:
    """The shards of a destination. ValueError: it is not the finished result of this conversion."""
    folder = Path(plan.destination)
    lines = read_lines(folder)
    if not lines:
        raise ValueError(
            f"the destination must be a new folder or the result of the same conversion, and {folder} exists "
            "and is neither; choose another one"
        )
    check_same(folder, lines[0], description)
    shards = shards_in(lines)
    if shards.keys() != set(range(plan.shards)):
        raise ValueError(
            f"{folder / NAME} must list all files of the result, and lists {len(shards)} of {plan.shards} files; "
            f"delete {folder}, and run the conversion again"
        )
    return shards


def _remove_unfinished(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
