"""A training loop's checkpoints, by Orbax: saved while the loop runs on, restored on any topology.

A checkpoint is the folder `<directory>/<step>` with two items: `state`, the trainer's arrays, and `feed`,
what the feed's `get_state` gave after the batch of that step, as JSON.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline.errors import FeedError
from feedline.trainer.checkpoint_checks import (
    check_same_arrays,
    check_same_data,
    check_same_step,
    checkpoint_removed,
    naming_the_checkpoint,
)
from feedline.trainer.folder import Lock, prepare
from feedline.trainer.learner import State

_KEPT = 3  # checkpoints: the newest, and two to fall back on; a fourth drops the oldest


class Resumable(Protocol):
    """An iterator of batches that can tell where it stands, and go back there: a `feedline.Feed`."""

    def get_state(self) -> dict[str, Any]:
        """JSON values, true for the last batch delivered.

        With "step": how many were delivered, and "fingerprint": what the rows are, and in which order, by field.
        """

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there. ValueError if the state is one of other data."""


class Checkpoints:
    """Checkpoints of one run in one directory. Use it as a context manager.

    With several processes all of them call the same methods in the same order, and the directory is one that
    all of them see. Orbax copies the arrays and then writes on threads of its own; leaving the context waits
    for them. A checkpoint counts once its folder has its final name, which is the last thing that happens to
    it, so a process that is killed while it saves leaves the checkpoint before it as the newest.

    Args:
      directory: made if there is none. The newest 3 checkpoints are kept.
      feed: what hands out the batches of the loop.
      mesh: the devices of the loop.
      every: steps from one checkpoint to the next, for `after_step`.

    Raises:
      ValueError: it holds something else, and no checkpoint.
      FeedError: another run uses it.
      OSError: it cannot be made, or not be written to.
    """

    def __init__(self, directory: Path, feed: Resumable, mesh: Mesh, every: int) -> None:
        prepare(directory)
        # process 0 alone deletes and renames; while it is refused, the others wait and are ended with its message
        self._lock = Lock(directory) if jax.process_index() == 0 else None
        self.directory = directory
        self._feed = feed
        self._replicated_sharding = NamedSharding(mesh, P())
        self._every = every
        self._step = 0  # of the last state that was seen
        try:
            self._manager = _manager(directory)
        except BaseException:
            self._release_lock()
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written. Not after an error with several processes: the others may be gone."""
        try:
            if error is None:
                self._wait_until_written()
                self._manager.close()
            elif jax.process_count() == 1:
                try:
                    self._manager.close()
                except (ValueError, OSError) as unwritten:  # must not take the place of the error
                    error.add_note(str(self._write_error(unwritten)))
        finally:
            self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def restore(self, state: State) -> State:
        """The newest checkpoint's state, and the feed set to go on from there. `state` if there is none.

        Args:
          state: one of the same model on the devices of this run. The result has its shardings, whatever
            the topology that saved.

        Raises:
          ValueError: the checkpoint is of other data or another model, which names the field; its parts are of
            different steps; or something else wrote it.
          FeedError: it is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            return state
        folder = self.directory / str(step)
        with naming_the_checkpoint(folder):
            saved = dict(self._manager.item_metadata(step).items())
        check_same_arrays(folder, saved, state)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated_sharding), state
        )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), feed=ocp.args.JsonRestore())
        with naming_the_checkpoint(folder):
            found: Any = self._manager.restore(step, args=items)
        check_same_step(folder, int(jax.device_get(found.state.step)), found.feed["step"])
        check_same_data(folder, found.feed.get("fingerprint", {}), self._feed.get_state()["fingerprint"])
        try:
            self._feed.set_state(found.feed)
        except ValueError as error:
            raise ValueError(f"the checkpoint {folder} cannot be gone on from here: {error}") from error
        self._step = step
        restored: State = jax.tree.map(lambda leaf, like: _replicated(leaf, like.sharding), found.state, state)
        return restored

    def after_step(self, state: State, loss: jax.Array) -> None:
        """Count a step, and save if it is a multiple of `every`. Call it before the next batch is asked for.

        Nothing is saved once the loss is no finite number: it would push out the last good checkpoint.
        """
        self._step += 1
        if self._step % self._every == 0 and math.isfinite(jax.device_get(loss)):
            self.save(state)

    def save(self, state: State) -> None:
        """Begin to save, unless this step is saved. Waits for the save before it, and for the copy of the state.

        Raises:
          ValueError: the trainer and the feed are not at the same step.
          FeedError: this save or the one before it could not be written.
        """
        feed = self._feed.get_state()
        trained = int(jax.device_get(state.step))
        if trained != feed["step"]:
            raise ValueError(
                f"a checkpoint needs trainer and feed at the same step, but the trainer has done {trained} and "
                f"the feed has delivered {feed['step']}; save right after the step that took the feed's last batch"
            )
        self._wait_until_written()
        if trained == self._manager.latest_step():
            return
        arrays = jax.tree.map(lambda leaf: _replicated(leaf, self._replicated_sharding), state)
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), feed=ocp.args.JsonSave(feed))
        try:
            self._manager.save(trained, args=items, force=True)
        except (ValueError, OSError) as error:
            raise self._write_error(error) from error

    def _wait_until_written(self) -> None:
        """Wait until what was begun is written."""
        try:
            self._manager.wait_until_finished()
        except (ValueError, OSError) as error:  # TensorStore's are ValueErrors, also that of a full disk
            raise self._write_error(error) from error

    def _write_error(self, error: Exception) -> FeedError:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        cause = os.strerror(int(code[1])) if code else str(error)
        newest = self._manager.latest_step()
        return FeedError(
            f"a checkpoint could not be written: {cause}. The newest whole one is "
            f"{'none' if newest is None else f'that of step {newest}'}; make room or choose another directory, "
            "and start again",
            stage="checkpoint",
            process=jax.process_index(),
            file=str(self.directory),
        )


def _manager(directory: Path) -> ocp.CheckpointManager:
    try:
        return ocp.CheckpointManager(
            directory.absolute(),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "feed": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT, cleanup_tmp_directories=True),
        )
    except FileNotFoundError as error:
        raise checkpoint_removed(Path(error.filename or directory), "it was listed") from error


def _replicated(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same array, replicated over the mesh of `sharding`, whose devices here hold it already. Moves nothing.

    pmap gives arrays that are replicated over the devices of one process, which Orbax refuses when there are
    several; and it takes no others.
    """
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
