"""Conversion and check of one shard: functions of the plan and the number, for any machine."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedline._src.errors import FeedError
from feedline._src.sources.open_source import open_source
from feedline._src.tools.convert.columns import RowReader, reader_of
from feedline._src.tools.convert.comparison import Digest, first_difference
from feedline._src.tools.convert.plan import Plan
from feedline._src.tools.convert.writers import WRITERS

UNFINISHED = ".unfinished-"
"""The names of the folders in which shards are written begin with this."""


def convert_shard(plan: Plan, shard: int) -> dict[str, Any]:
    """Write a shard, and return {"shard": its number, "digest": the digest of its rows in the source}.

    The shard appears under its name once it is complete and on the disk. Several processes may write the same one:
    the last one replaces it by the same rows.

    Raises:
      FeedError: a row cannot be read.
      OSError: it cannot be written.
    """
    digest = Digest(list(plan.reader.kinds))
    final = plan.path_of(shard)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=plan.folder) as folder, _full_disk_named(plan):
        path = Path(folder, final.name)
        writer = WRITERS[plan.format](path, plan.reader.kinds, len(plan.rows_of(shard)), plan.rows_per_chunk)
        with writer as append:
            for start, stop in plan.chunks_of(shard):
                columns = plan.reader.read(start, stop)
                digest.update(columns)
                append(columns)
        for file in [path, *path.rglob("*")]:
            sync(file)
        if final.is_dir():  # a folder cannot be replaced
            shutil.rmtree(final)
        os.replace(path, final)
    sync(plan.folder)
    return {"shard": shard, "digest": digest.hexdigest()}


def digest_shard(plan: Plan, shard: int) -> dict[str, Any]:
    """Read the rows of a shard from the source alone, and return what `convert_shard` returns.

    Raises:
      FeedError: a row cannot be read.
    """
    digest = Digest(list(plan.reader.kinds))
    for start, stop in plan.chunks_of(shard):
        digest.update(plan.reader.read(start, stop))
    return {"shard": shard, "digest": digest.hexdigest()}


def check_shard(plan: Plan, digests: Mapping[int, str], shard: int) -> dict[str, Any]:
    """Read a shard back, and return {"shard": its number} if its rows have the digest of the source's rows.

    Raises:
      FeedError: they have not; it names the first row that differs.
    """
    path, rows = plan.path_of(shard), plan.rows_of(shard)
    with _opened(plan, path, len(rows)) as written:
        digest = Digest(list(plan.reader.kinds))
        for start, stop in plan.chunks_of(shard):
            digest.update(written.read(start - rows.start, stop - rows.start))
        if digest.hexdigest() != digests[shard]:
            raise _difference(plan, shard, written)
    return {"shard": shard}


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(plan: Plan, path: Path, expected: int) -> Iterator[RowReader]:
    """A reader of the file of a shard, after a check of its leaves and of the number of its rows."""
    remedy = "delete this file and run the conversion again, which writes only this file again"
    try:
        source = open_source(path, **plan.open_options)
        reader, count = reader_of(source), len(source)
    except (FeedError, ValueError, TypeError, OSError) as error:
        raise FeedError(f"a converted file cannot be read: {error}; {remedy}", file=str(path)) from error
    with contextlib.closing(source):
        if count != expected or dict(reader.kinds) != dict(plan.reader.kinds):
            raise FeedError(
                f"a converted file must have {expected} rows of {dict(plan.reader.kinds)}, and has {count} of "
                f"{dict(reader.kinds)}; {remedy}",
                file=str(path),
            )
        yield reader


def _difference(plan: Plan, shard: int, written: RowReader) -> FeedError:
    """The error for the first row of a shard that is not the source's."""
    path, first = str(plan.path_of(shard)), plan.rows_of(shard).start
    for start, stop in plan.chunks_of(shard):
        found = first_difference(plan.reader.read(start, stop), written.read(start - first, stop - first))
        if found is not None:
            offset, name = found
            return FeedError(
                "the rows read back must equal those of the source, and "
                f"{repr(name) if name else 'a row'} differs in this one; delete this file and run the conversion "
                "again, which writes only this file again",
                row=start + offset,
                file=path,
            )
    return FeedError(
        "a source must give the same rows whenever they are read, and rows "
        f"{first} to {plan.rows_of(shard).stop - 1} were others when they were converted; take what is random out "
        "of the source, delete this file and run the conversion again",
        file=path,
    )


@contextlib.contextmanager
def _full_disk_named(plan: Plan) -> Iterator[None]:
    """Turn the errors that libraries raise for a full disk into one that says what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, FeedError) or full not in str(error):
            raise
        raise OSError(
            errno.ENOSPC,
            f"{full} for the next file of {plan.rows_per_shard} rows, about "
            f"{plan.rows_per_shard * plan.reader.row_bytes / 1e6:,.1f} MB; finished files are kept, so free some "
            "space and run the conversion again",
            str(plan.folder),
        ) from error
