"""Validates and locks a checkpoint directory: it is writable, holds only checkpoints, and is used by one run."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
from pathlib import Path

from feedline._src.errors import FeedError

TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of a folder whose checkpoint Orbax has not finished."""
_LOCK = ".feedline-lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger("feedline")


def prepare(directory: Path) -> None:
    """Create the directory, and check before training that checkpoints can be written to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory, prefix=".").close()
        names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
        names = [name for name in names if name != "lost+found"]  # every ext4 volume has one
    except OSError as error:
        file = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
        found = (
            f"{file} is a file" if not file.is_dir() else f"{directory} cannot be written to ({error.strerror})"
        )
        raise OSError(
            f"checkpoints go into a directory that can be written to, and {found}; choose another directory"
        ) from error
    if names and not any(name.isdecimal() or TEMPORARY in name for name in names):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"checkpoints go into a directory of their own, and {directory} holds {names[0]}{more} but no "
            "checkpoint; choose a new or empty directory"
        )


class Lock:
    """A lock on a checkpoint directory: a second run would delete and overwrite the checkpoints of the first.

    It is a kernel lock (flock) on a file in the directory. The kernel releases it when the process ends, even by
    SIGKILL; the file stays. On NFS it works across hosts. If the file system has no locks, a warning is logged.

    Raises:
      FeedError: another run holds the lock; the message names its process and host.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 1 << 10).decode(errors="replace").strip()
            if error.errno not in _NO_LOCKS:
                self.close()
                raise _in_use(directory, holder) from error
            _log.warning("%s has no file locks (%s): give no other run this directory", directory, error.strerror)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _in_use(directory: Path, holder: str) -> FeedError:
    return FeedError(
        "a directory of checkpoints belongs to one run at a time, and this one is used by another run: "
        f"{holder or 'a process that has not said which'}; wait for its end, or choose another directory",
        stage="checkpoint",
        file=str(directory),
    )
