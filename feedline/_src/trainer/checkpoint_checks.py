"""Checks of a checkpoint before it is restored: changed files, another model, and parts of different steps.

The digests of its files stand in `files.sha256` in its folder, in the format of `sha256sum`. Orbax compares no
checksums: a flipped bit in its files may become another weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from feedline._src.trainer.task import State

DIGESTS = "files.sha256"
_HEX_DIGITS = 64


def write_digests(folder: Path) -> None:
    """Write the digests of all files in the folders of a checkpoint, which no other process changes any more."""
    (folder / DIGESTS).write_text("".join(f"{_digest(folder / name)}  {name}\n" for name in _names(folder)))


def changed_files(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """The files of a checkpoint that have other bytes than when it was saved, are missing, or were not saved.

    Args:
      share: which of `shares` equal parts of the files is read, so that several processes need not read all.

    Raises:
      OSError: a file cannot be read, or the checkpoint has no digests.
    """
    lines = (folder / DIGESTS).read_bytes().decode(errors="replace").splitlines()
    saved = {line[_HEX_DIGITS + 2 :]: line[:_HEX_DIGITS] for line in lines}
    found = _names(folder)
    return [
        name
        for name in sorted({*saved, *found})[share::shares]
        if name not in found or saved.get(name) != _digest(folder / name)
    ]


def check_same_arrays(folder: Path, saved: Mapping[str, Any], state: State) -> None:
    """Refuse a checkpoint whose metadata `saved` differs from the arrays of `state`. Reads no arrays."""
    if saved.keys() != {"state", "feed"} or saved["state"] is None:
        raise ValueError(
            f"a checkpoint of this trainer holds its state and a feed's, but {folder} holds "
            f"{', '.join(sorted(saved)) or 'nothing'}: a part was removed, or something else wrote it; choose "
            "another directory, or remove the folder to go on from the one before it"
        )
    theirs = {leaf.name: _described(leaf) for leaf in jax.tree.leaves(saved["state"].tree)}
    ours = {
        jax.tree_util.keystr(path, simple=True, separator="."): _described(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    for name in {**ours, **theirs}:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the checkpoint {folder} is of another model: its {name.removesuffix('.value')} is "
                f"{theirs.get(name, 'missing')}, this run's is {ours.get(name, 'missing')}. Give the sizes that "
                "it was trained with, or another directory"
            )


def check_same_step(folder: Path, trained: int, delivered: int) -> None:
    """Refuse a checkpoint whose folder, trainer and feed are not at the same step."""
    if not int(folder.name) == trained == delivered:
        raise ValueError(
            f"the parts of a checkpoint must be of one step, but the folder {folder} is of step {folder.name}, "
            f"its trainer had done {trained} and its feed had delivered {delivered}; remove the folder to go on "
            "from the checkpoint before it"
        )


def _names(folder: Path) -> list[str]:
    """The files in the folders of `folder`, except those whose names begin with a dot.

    The files beside these folders are not among them: Orbax changes them until the very end.
    """
    paths = (path for item in folder.iterdir() if item.is_dir() for path in item.rglob("*"))
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_file() and path.name[0] != ".")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _described(array: Any) -> str:
    """Example: float32[64, 128]."""
    return f"{array.dtype}{list(array.shape)}"
