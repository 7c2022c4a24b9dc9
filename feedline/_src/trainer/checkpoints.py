"""Checkpoints of a training loop, with Orbax: written while training continues, restored on any topology.

A checkpoint is the folder `<directory>/<step>` with two items: `state`, the trainer's arrays, and `feed`,
the result of the feed's `get_state` after the batch of that step, as JSON. Digests of their files are beside them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.agreement.step_places import StepPlaces
from feedline._src.errors import FeedError, OtherDataError
from feedline._src.trainer.checkpoint_checks import (
    DIGESTS,
    changed_files,
    check_same_arrays,
    check_same_step,
    write_digests,
)
from feedline._src.trainer.folder import TEMPORARY, Lock, prepare
from feedline._src.trainer.task import State, all_finite

_log = logging.getLogger("feedline")
_KEPT = 3  # checkpoints: the newest and two older ones; saving a fourth deletes the oldest


class Checkpoints:
    """Checkpoints of one run in one directory. Use it as a context manager.

    With several processes all of them call the same methods in the same order, and share the directory.
    Orbax copies the arrays and then writes on its own threads; leaving the context waits for them. Renaming
    the folder to its final name completes a checkpoint, so if a process is killed while it saves, the
    previous checkpoint remains the newest.

    Args:
      directory: created if it does not exist. The newest 3 checkpoints are kept.
      feed: the iterator of the loop's batches. Its `get_state` gives JSON values with "step", the number of
        batches delivered; `set_state` goes on from there, or raises ValueError if they are of other data.
      mesh: the devices of the loop.
      asynchronous: write while training continues. False: `save` returns when the checkpoint is whole.

    Raises:
      ValueError: the directory holds other files, and no checkpoint.
      FeedError: another run uses the directory.
      OSError: the directory cannot be created or written to.
    """

    def __init__(self, directory: Path, feed: Any, mesh: Mesh, asynchronous: bool = True) -> None:
        prepare(directory)
        # only process 0 deletes and renames; if it is refused, the others wait, and are ended with its message
        self._lock = Lock(directory) if jax.process_index() == 0 else None
        self.directory = directory
        self._feed = feed
        self._replicated_sharding = NamedSharding(mesh, P())
        self._step_places = StepPlaces("checkpoints", {device.process_index for device in mesh.devices.flat})
        self._asynchronous = asynchronous
        self._saving = 0  # the step of the last save that was started
        try:
            self._manager = ocp.CheckpointManager(
                directory.absolute(),
                item_handlers={"state": ocp.StandardCheckpointHandler(), "feed": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=_KEPT,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._write_digests),
                ),
            )
        except BaseException:
            self._release_lock()
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for unfinished writes. Not after an error with several processes: the others may have exited."""
        try:
            if error is None:
                self._wait_until_written()
                self._manager.close()
            elif jax.process_count() == 1:
                try:
                    self._manager.close()
                except (ValueError, OSError) as unwritten:  # must not replace the first error
                    error.add_note(str(self._write_error(unwritten)))
        finally:
            self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def restore(self, state: State) -> State:
        """Restore the newest checkpoint: set the feed's state, and return the trainer's. `state` if there is none.

        Args:
          state: a state of the same model on the devices of this run. The result has the same shardings,
            even if another topology saved the checkpoint.

        Raises:
          ValueError: the checkpoint is of other data or another model (the message names the field), its parts are
            of different steps, or another program wrote it. Or there is none, and the feed was used before.
          FeedError: the checkpoint is damaged; the message names the newest one that is whole.
        """
        step = self._manager.latest_step()
        if step is None:
            self._feed_state(state)
            return state
        folder = self.directory / str(step)
        with self._reading(folder):
            # no process returns from Orbax's restore before all of them have called it
            if not (folder / DIGESTS).exists():
                _log.warning(
                    "the checkpoint %s was saved without digests of its files: damage would not be noticed", folder
                )
            elif changed := changed_files(folder, jax.process_index(), jax.process_count()):
                more = f", and so are {len(changed) - 1} more files" if len(changed) > 1 else ""
                raise ValueError(f"{changed[0]} is not as it was saved{more}")
            saved = dict(self._manager.item_metadata(step).items())
        check_same_arrays(folder, saved, state)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._global_sharding(x)), state
        )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), feed=ocp.args.JsonRestore())
        with self._reading(folder):
            found: Any = self._manager.restore(step, args=items)
        check_same_step(folder, int(jax.device_get(found.state.step)), found.feed["step"])
        try:
            self._feed.set_state(found.feed)
        except OtherDataError as error:
            remedy = error.remedy or "Give the data and the seed that it was trained with"
            raise ValueError(
                f"the checkpoint {folder} is of other data: {error.difference}. {remedy}, or another directory"
            ) from error
        except ValueError as error:
            raise ValueError(f"training cannot continue from the checkpoint {folder}: {error}") from error
        restored: State = jax.tree.map(lambda leaf, like: _with_sharding(leaf, like.sharding), found.state, state)
        return restored

    @contextlib.contextmanager
    def _reading(self, folder: Path) -> Iterator[None]:
        """Raise damage and errors of Orbax as a `FeedError` that names the newest checkpoint that is whole."""
        try:
            yield
        except Exception as error:
            whole = None
            for older in sorted(each for each in self._manager.all_steps() if each < int(folder.name)):
                with contextlib.suppress(OSError):
                    if not changed_files(self.directory / str(older)):
                        whole = older
            way_out = "no older one is whole; restore it from a copy, or begin again in another directory"
            if whole is not None:
                way_out = f"remove its folder to go on from that of step {whole}, the newest one that is whole"
            raise FeedError(
                f"the checkpoint is damaged, or cannot be read ({error}); {way_out}",
                stage="checkpoint",
                process=jax.process_index(),
                file=str(folder),
            ) from error

    def _global_sharding(self, leaf: jax.Array) -> jax.sharding.Sharding:
        """How a leaf of the state lies on the devices of all processes."""
        return self._replicated_sharding if leaf.sharding.is_fully_replicated else leaf.sharding

    def save_if_finite(self, step: int, state: State, recent: jax.Array) -> None:
        """Save the state after a step, before the next batch is asked for.

        Not once a loss or the parameters are not finite: such a checkpoint would displace a good one.

        Args:
          recent: the metrics of the last steps, as in `modes.Program`.
        """
        losses = jax.device_get(recent)[:, 0].tolist()  # 0 where no step has been
        if all(map(math.isfinite, losses)) and all_finite(state.params):
            self.save(state)

    def save(self, state: State) -> None:
        """Start saving this step, unless it is saved. Waits for the previous save, and until the state is copied.

        Raises:
          ValueError: the trainer and the feed are not at the same step.
          ProcessError: the feeds of two processes are not at the same place. Nothing is written then.
          FeedError: this save or the previous one could not be written.
        """
        feed = self._feed_state(state)
        trained: int = feed["step"]
        if "position" in feed:
            self._step_places.compare(trained, feed["epoch"], feed["position"])
        self._wait_until_written()
        if trained == self._manager.latest_step():
            return
        arrays = jax.tree.map(lambda leaf: _with_sharding(leaf, self._global_sharding(leaf)), state)
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), feed=ocp.args.JsonSave(feed))
        self._saving = trained
        try:
            self._manager.save(trained, args=items, force=True)
        except (ValueError, OSError) as error:
            raise self._write_error(error) from error
        if not self._asynchronous:
            self._wait_until_written()

    def _feed_state(self, state: State) -> dict[str, Any]:
        """The feed's state. ValueError if trainer and feed are not at the same step."""
        feed: dict[str, Any] = self._feed.get_state()
        trained = int(jax.device_get(state.step))
        if trained != feed["step"]:
            raise ValueError(
                f"a checkpoint needs trainer and feed at the same step, but the trainer has done {trained} and "
                f"the feed has delivered {feed['step']}; begin with a new feed, and save right after the step "
                "that took its last batch"
            )
        return feed

    def _write_digests(self) -> None:
        """Orbax calls this on process 0 and its own thread, before a checkpoint with all files gets its name."""
        for folder in self.directory.glob(f"{self._saving}{TEMPORARY}*"):
            write_digests(folder)

    def _wait_until_written(self) -> None:
        """Wait until the started save is written."""
        try:
            self._manager.wait_until_finished()
        except (ValueError, OSError) as error:  # TensorStore raises ValueError even for a full disk
            raise self._write_error(error) from error

    def _write_error(self, error: Exception) -> FeedError:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        cause = os.strerror(number) if number else str(error)
        newest = self._manager.latest_step()
        return FeedError(
            f"a checkpoint could not be written: {cause}. The newest whole one is "
            f"{'none' if newest is None else f'that of step {newest}'}; make room or choose another directory, "
            "and start again",
            stage="checkpoint",
            process=jax.process_index(),
            file=str(self.directory),
        )


def _with_sharding(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The same array with a sharding by which each local device holds what it holds already. Copies no data.

    The arrays of pmap are replicated over the devices of one process, which Orbax refuses with several processes;
    and pmap accepts no others.
    """
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
