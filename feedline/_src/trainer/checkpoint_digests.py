"""Digests of the files of a checkpoint: written before it is complete, and compared before it is restored.

They stand in `files.sha256` in the checkpoint's folder, in the format of `sha256sum`. Orbax compares no checksums:
a flipped bit in its files may become another weight.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

NAME = "files.sha256"
_HEX_DIGITS = 64


class DamageError(Exception):
    """What of a checkpoint is not as it was saved."""


def write(folder: Path) -> None:
    """Write the digests of all files in the folders of a checkpoint, which no other process changes any more."""
    lines = [f"{_digest(folder / name)}  {name}\n" for name in _names(folder)]
    (folder / NAME).write_text("".join(lines))


def check(folder: Path, share: int = 0, shares: int = 1) -> bool:
    """Compare the files of a checkpoint with their digests.

    Args:
      share: which of `shares` equal parts of the files is read, so that several processes need not read all. The
        names of all files are compared.

    Returns:
      Whether the checkpoint has digests. One that was saved before there were digests has none.

    Raises:
      DamageError: a file was changed, is missing, or was not saved.
      OSError: a file cannot be read.
    """
    if not (folder / NAME).exists():
        return False
    saved = _saved(folder / NAME)
    found = set(_names(folder))
    if missing := sorted(saved.keys() - found):
        raise DamageError(f"{missing[0]} is missing{_and_more(missing)}")
    if more := sorted(found - saved.keys()):
        raise DamageError(f"{more[0]} was not saved with it{_and_more(more)}")
    names = sorted(saved)[share::shares]
    if changed := [name for name in names if _digest(folder / name) != saved[name]]:
        raise DamageError(f"{changed[0]} has other bytes than when it was saved{_and_more(changed)}")
    return True


def _saved(path: Path) -> dict[str, str]:
    """The digest of each file when it was saved."""
    saved = {}
    for line in path.read_bytes().decode(errors="replace").split("\n")[:-1]:
        digest, separator, name = line[:_HEX_DIGITS], line[_HEX_DIGITS : _HEX_DIGITS + 2], line[_HEX_DIGITS + 2 :]
        if separator != "  " or not name:
            raise DamageError(f"{NAME} has other bytes than when it was saved")
        saved[name] = digest
    return saved


def _names(folder: Path) -> list[str]:
    """The files in the folders of `folder`, except those whose names begin with a dot.

    The files beside these folders are not among them: Orbax changes them until the very end.
    """
    paths = (path for item in folder.iterdir() if item.is_dir() for path in item.rglob("*"))
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_file() and path.name[0] != ".")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _and_more(names: list[str]) -> str:
    return f", and so are {len(names) - 1} more files" if len(names) > 1 else ""
