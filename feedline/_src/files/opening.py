"""Opening a file for reading, with errors that say what to change."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from feedline._src.errors import FeedError


@contextlib.contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """Open the file at `path` for the length of a `with` block.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is a folder.
      OSError: the disk fails, or this process has too many open files; also if that happens inside the block. It
        names the file.
    """
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise folder_error(path) from None
    except OSError as error:
        if error.errno != errno.EMFILE:
            if error.filename is None:  # of a read inside the block
                error.filename = str(path)
            raise
        raise OSError(
            errno.EMFILE,
            "each file of a source stays open, with a descriptor, and this process may open no more (ulimit -n); "
            "raise that limit, or merge shards",
            str(path),
        ) from error


def check_may_open(error: Exception, path: str) -> None:
    """Tell an `error` of reading the file at `path` from a bad row: no more files could be opened.

    Raises:
      FeedError: that is what `error` says.
    """
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise FeedError(
            f"a file is opened for each read, and no more can be opened ({os.strerror(error.errno)}); raise the "
            "limit (ulimit -n), or close other files",
            stage="read",
            file=path,
        ) from error


def folder_error(path: Path) -> ValueError:
    """The error to raise if a path is a folder instead of a file."""
    files = f"{path}/*{path.suffix}"
    return ValueError(f"{path} is a folder; pass a glob of files: open_source({files!r})")
