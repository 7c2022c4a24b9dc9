"""Checks of a checkpoint: damage, other data, another model, and parts of different steps are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from feedline._src.errors import FeedError
from feedline._src.trainer.checkpoint_digests import DamageError
from feedline._src.trainer.task import State


def checkpoint_removed(folder: Path, meanwhile: str) -> FeedError:
    """The error for a checkpoint that another program removed, for example while "it was read"."""
    return FeedError(
        f"the checkpoint of step {folder.name.partition('.')[0]} was removed while {meanwhile}: another program "
        f"deletes in {folder.parent}; stop that, and start again to go on from the newest checkpoint that is left",
        stage="checkpoint",
        process=jax.process_index(),
        file=str(folder),
    )


@contextlib.contextmanager
def naming_the_checkpoint(folder: Path, whole_before: Callable[[int], int | None]) -> Iterator[None]:
    """Raise damage and errors of Orbax as a `FeedError` that names the checkpoint's folder.

    Args:
      whole_before: the newest step before the given one whose checkpoint is whole.
    """
    try:
        yield
    except Exception as error:
        if not folder.exists():
            raise checkpoint_removed(folder, "it was read") from error
        found = "is damaged" if isinstance(error, DamageError) else "cannot be read"
        whole = whole_before(int(folder.name))
        if whole is None:
            way_out = "no older one is whole; restore it from a copy, or begin again in another directory"
        else:
            way_out = f"remove its folder to go on from that of step {whole}, the newest one that is whole"
        raise FeedError(
            f"the checkpoint {found} ({error}); {way_out}",
            stage="checkpoint",
            process=jax.process_index(),
            file=str(folder),
        ) from error


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


def _described(array: Any) -> str:
    """Example: float32[64, 128]."""
    return f"{array.dtype}{list(array.shape)}"
