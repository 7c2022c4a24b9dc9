"""A file that is opened to be read, and what to do where it cannot be."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, open inside the block.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is a folder.
      OSError: this process has too many files open, also where that is found inside the block.
    """
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise is_a_folder(path) from None
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE,
            "each file of a source stays open, with a descriptor, and this process may open no more (ulimit -n); "
            "raise that limit, or merge shards",
            str(path),
        ) from error


def is_a_folder(path: Path) -> ValueError:
    """What to raise where a folder was given in place of a file."""
    files = f"{path}/*{path.suffix}"
    return ValueError(f"{path} is a folder; pass a glob of files: open_source({files!r})")
