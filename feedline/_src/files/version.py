"""Versions of files, which detect that one was replaced or written to meanwhile."""

from __future__ import annotations

import multiprocessing
import os
from typing import NamedTuple

from feedline._src.errors import FeedError


class FileVersion(NamedTuple):
    """What changes when a file is replaced or written to, as plain integers that can be sent to worker processes.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> path = Path(tempfile.mkdtemp()) / "rows.bin"
      >>> _ = path.write_bytes(bytes(4))
      >>> version = FileVersion.of(path)
      >>> version.check(path)  # unchanged: nothing happens
      >>> _ = path.write_bytes(bytes(8))
      >>> try:
      ...     version.check(path)
      ... except FeedError as error:
      ...     print(error.stage, error.message.split(" since")[0])
      read a file must not change while a feed reads it, and it has 8 bytes and had 4
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileVersion:
        """The version of the file at `path` now. OSError if there is none."""
        return cls._from(os.stat(path))

    @classmethod
    def of_open(cls, descriptor: int) -> FileVersion:
        """The version of an open file, even if its path is another file by now."""
        return cls._from(os.fstat(descriptor))

    @classmethod
    def _from(cls, found: os.stat_result) -> FileVersion:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check(self, path: str | os.PathLike[str]) -> None:
        """Refuse a file that was replaced, deleted or written to since this version was taken.

        Raises:
          FeedError: it changed; the message says whether its size, its time or the file itself differs.
        """
        try:
            now = FileVersion.of(path)
        except OSError as error:
            raise changed(path, f"it cannot be found any more ({error.strerror})") from error
        self.compare(now, path)

    def check_open(self, path: str | os.PathLike[str]) -> None:
        """Refuse a file that was written to. It is open or mapped, and may be replaced: the old one stays open.

        Raises:
          FeedError: it was written to or truncated.
        """
        try:
            now = os.stat(path)
        except OSError:
            return
        if (now.st_dev, now.st_ino) == (self.device, self.inode):
            self.compare(FileVersion._from(now), path)

    def compare(self, now: FileVersion, path: str | os.PathLike[str]) -> None:
        """Refuse a file whose version is `now` another one. FeedError says what differs."""
        if now == self:
            return
        if now.size_bytes != self.size_bytes:
            found = f"it has {now.size_bytes} bytes and had {self.size_bytes}"
        elif (now.device, now.inode) != (self.device, self.inode):
            found = "another file lies at its path"
        else:
            found = "it was written to"
        raise changed(path, found)


def changed(path: str | os.PathLike[str], found: str) -> FeedError:
    """The error for a file that changed while it was in use; `found` says how."""
    hint = ""
    if multiprocessing.parent_process() is not None:
        hint = (
            ". A worker process imports your script again: what writes the file must stand under `if __name__ == "
            '"__main__":`'
        )
    return FeedError(
        f"a file must not change while a feed reads it, and {found} since the source was opened. Write new data "
        f"to a new path, and build a new feed{hint}",
        stage="read",
        file=os.fspath(path),
    )
