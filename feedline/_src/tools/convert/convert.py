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

from feedline._src.options import checked_integer
from feedline._src.rows.encoded_source import EncodedRows, is_encoded_source
from feedline._src.rows.indexed import IndexedSource
from feedline._src.sources.lanes import Lanes
from feedline._src.sources.open_source import as_source, open_source
from feedline._src.tools.convert.formats import FormatName, same_rows, sync
from feedline._src.tools.convert.manifest import NAME, Manifest, state_of_files
from feedline._src.tools.convert.processes import mapped_in_processes
from feedline._src.tools.convert.shards import UNFINISHED, Plan, convert_shard, digest_shard

Map = Callable[[Callable[[int], dict[str, Any]], Sequence[int]], Iterable[dict[str, Any]]]
"""As the builtin `map`, but results may come in any order."""


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
        plan = Plan.of(opened, destination, format, rows_per_shard)
        for _ in converting(plan, opened, workers, map):
            pass
    finally:
        if opened is not source:
            opened.close()
    return plan.opened(plan.destination)  # type: ignore[no-any-return]


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
    checked_integer("workers", workers, at_least=0)
    if map is not None and workers:
        raise ValueError(f"map runs the shards in place of worker processes, got both and workers={workers}")
    if (map is not None or workers) and not getattr(source, "picklable", True):
        raise TypeError(
            "other processes cannot read arrays in the memory of this one; convert with workers=0, or pass a "
            "source of files"
        )
    files, folder = state_of_files(source), plan.folder
    if folder == plan.destination and not (folder / NAME).is_file():
        raise ValueError(
            f"the destination must be a new folder or the result of the same conversion, and {folder} exists "
            "and is neither; choose another one"
        )
    with Manifest(folder, plan.destination, plan.description(source.identity)) as manifest:
        _remove_unfinished(folder)
        try:
            with mapped_in_processes(workers) if workers else contextlib.nullcontext(map or builtins.map) as run:
                yield from _steps(plan, manifest, files, run)
        finally:
            _remove_unfinished(folder)
        with contextlib.closing(plan.opened(folder)) as written:  # by one glob, as a user does
            same_rows(written, plan.rows.dtype, plan.count)
        if not manifest.finished:
            os.rename(folder, plan.destination)
            sync(plan.destination.parent)


def _steps(plan: Plan, manifest: Manifest, files: str | None, run: Map) -> Iterator[Progress]:
    """Compare the shards of earlier runs with the source, where it may have changed, and convert all others.

    Args:
      files: the state of the source's files; None: unknown.
    """
    there = {i: shard for i, shard in manifest.shards.items() if plan.path_of(i).exists()}
    missing = [i for i in range(plan.shards) if i not in there]
    if manifest.finished and missing:
        raise ValueError(
            f"{plan.folder} must have all files of the result, and {plan.path_of(missing[0]).name} is missing; "
            f"delete the folder, or rename it to {plan.folder}.partial to keep its files, and convert again"
        )
    kept = [i for i, shard in there.items() if files is not None and shard.get("files") == files]

    def stage(
        name: Literal["compare", "convert"],
        call: Callable[[Plan, int], dict[str, Any]],
        shards: Sequence[int],
    ) -> Iterator[Progress]:
        rows, total, left = 0, plan.rows_in(shards), set(shards)
        if shards:
            yield Progress(name, rows, total)
        for result in run(functools.partial(call, plan), shards) if shards else ():
            i = result["shard"]
            if i not in left:
                raise ValueError(
                    f"map must return the result of each call once, and got that of {plan.path_of(i).name} again; "
                    "mend the function that was passed as map"
                )
            left.remove(i)
            if i in there and result["digest"] != there[i]["digest"]:
                at = plan.rows_of(i)
                remedy = "" if manifest.finished else "this file, or to convert all rows again "
                raise ValueError(
                    f"the source must still have the rows that an earlier run converted, and rows {at.start} to "
                    f"{at.stop - 1} of the source differ from those of {plan.path_of(i).name}: it has changed, or "
                    f"gives other values each time; delete {remedy}{plan.folder}, and run the conversion again"
                )
            line = {**result, "files": files}
            if not manifest.finished and line != there.get(i):
                manifest.add(line)
            rows += plan.rows_in([i])
            yield Progress(name, rows, total)
        if left:
            raise ValueError(
                f"map must return the result of each call once, and lost those of {len(left)} of {len(shards)} "
                "files; mend the function that was passed as map"
            )

    yield Progress("keep", plan.rows_in(kept), plan.rows_in(kept))
    yield from stage("compare", digest_shard, [i for i in there if i not in kept])
    yield from stage("convert", convert_shard, missing)


def _remove_unfinished(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
