"""Checkpoints of a training loop, with Orbax: written while training continues, restored on any topology.

A checkpoint is the folder `<directory>/<step>` with three items: `state`, the trainer's arrays; `feed`, the result
of the feed's `get_state` after the batch of that step, as JSON; and `checksums` of both. Orbax has no checksums:
it may restore a flipped bit as another weight. The files of a stream's lanes contain checksums of their own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.agreement.coordination import coordination, counted, process_names
from feedline._src.checkpoint import Handler, Save
from feedline._src.errors import FeedError, OtherDataError
from feedline._src.loader.lane_files import read_state
from feedline._src.trainer.task import State

_log = logging.getLogger("feedline")
_KEPT = 3  # checkpoints: the newest and two older ones; saving a fourth deletes the oldest
_ITEMS = {
    "state": ocp.StandardCheckpointHandler(),
    "feed": Handler(),
    "checksums": ocp.JsonCheckpointHandler(),
}
_LOCK = ".feedline-lock"
_FOREVER_S = 1e9
_SEEN_S = 120.0  # a network file system may show a new file only after a minute


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Checkpoints of one run in one directory. Use it as a context manager, which waits for unfinished writes.

    With several processes, all call the same methods in the same order, and share the directory. A checkpoint
    is complete once its folder is renamed; after a kill during a save, the previous one stays the newest.

    Raises:
      TypeError: the feed has no state.
      ValueError: the directory is the address of a bucket, or the mesh lacks a process of the run.
      FeedError: another run uses the directory, or the processes do not share it.
      OSError: the directory cannot be created or written to.
    """

    def __init__(self, directory: Path, feed: Any, mesh: Mesh) -> None:
        if not hasattr(feed, "get_state") or not hasattr(feed, "set_state"):
            raise TypeError(
                f"checkpoints hold the feed's state, and {type(feed).__name__} has no get_state or set_state; "
                "train on a feedline.Feed, or without checkpoint_dir"
            )
        if re.match(r"[a-z0-9]+:/", str(directory)):  # such as gs://bucket, from which Path removes a slash
            raise ValueError(
                f"checkpoints need a folder of the file system, got {directory}; give a folder that all processes "
                "share, or save to a bucket with Orbax in your own loop"
            )
        if len(members := {device.process_index for device in mesh.devices.flat}) < jax.process_count():
            raise ValueError(
                f"all {jax.process_count()} processes of a run write its checkpoints together, and the mesh has "
                f"devices of {process_names(sorted(members))} only; start each training as a run of its own, or "
                "train without checkpoint_dir, and save in your own loop"
            )
        self._directory = directory.absolute()
        self._feed = feed
        self._replicated = NamedSharding(mesh, P())
        with contextlib.ExitStack() as stack:
            # only process 0 deletes and renames; if it gets no lock, the others wait until its error ends them
            if jax.process_index() == 0:
                stack.enter_context(_lock(directory))
            _check_shared(directory)
            options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, cleanup_tmp_directories=True)
            self._manager = ocp.CheckpointManager(self._directory, item_handlers=_ITEMS, options=options)
            self._locked = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for writes, except after an error with several processes, since the others may have exited."""
        with self._locked:
            if error is not None and jax.process_count() > 1:
                return
            try:
                with self._write_errors():
                    self._manager.wait_until_finished()
                    self._manager.close()
            except FeedError as not_written:
                if error is None:
                    raise
                error.add_note(str(not_written))

    def restore(self, start: Callable[[], State]) -> State:
        """Restore the newest checkpoint, or return `start()` if there is none.

        Sets the feed's state, and returns the trainer's, with the shardings of the compiled function `start`.

        Raises:
          ValueError: the checkpoint was made with other data or another model, or by another program. Or there is
            no checkpoint, but the feed has already delivered batches.
          FeedError: the checkpoint is damaged, or this process read other values than were saved.
        """
        step = self._manager.latest_step()
        if step is None:
            state = start()
            self._feed_state(state)
            return state
        like = jax.eval_shape(start)  # not `start()`: two states may need more memory than the devices have
        folder = self._directory / str(step)
        with self._read_errors(folder):
            saved = dict(self._manager.item_metadata(step).items())
        if saved.keys() != _ITEMS.keys() or saved["state"] is None:
            raise ValueError(
                f"a checkpoint of this trainer holds {', '.join(sorted(_ITEMS))}, but {folder} holds "
                f"{', '.join(sorted(saved)) or 'nothing'}: a part was removed, or something else wrote it; choose "
                "another directory, or remove the folder to go on from the previous checkpoint"
            )
        _check_same_arrays(folder, saved["state"].tree, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(like), checksums=ocp.args.JsonRestore())
        with self._read_errors(folder):
            found: Any = self._manager.restore(step, args=items)
            feed = read_state(folder / "feed")  # for a stream, every process reads all lanes
            for name, checksum in _checksums(found.state, feed).items():
                if checksum != found.checksums.get(name):
                    raise ValueError(f"{name} is not as it was saved")
        try:
            self._feed.set_state(feed)
        except OtherDataError as error:
            remedy = error.remedy or "Give the data and the seed that it was trained with"
            raise ValueError(
                f"the checkpoint {folder} was made with other data: {error.difference}. {remedy}, or another "
                "directory"
            ) from error
        except ValueError as error:
            raise ValueError(f"training cannot continue from the checkpoint {folder}: {error}") from error
        restored: State = found.state
        return restored

    def save(self, state: State) -> None:
        """Start to save this step, unless it is saved already. Waits for the previous save and a copy of `state`.

        Raises:
          ValueError: the trainer and the feed are not at the same step.
          FeedError: this save or the previous one could not be written.
        """
        feed = self._feed_state(state)
        with self._write_errors():
            self._manager.wait_until_finished()
            if feed["step"] == self._manager.latest_step():
                return
            # the space is checked first, because Orbax's threads print tracebacks if a write fails
            if shutil.disk_usage(self._directory).free < sum(leaf.nbytes for leaf in jax.tree.leaves(state)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(jax.tree.map(self._over_the_mesh, state)),
                feed=Save(self._feed),
                checksums=ocp.args.JsonSave(_checksums(state, feed)),
            )
            self._manager.save(feed["step"], args=items, force=True)

    def _feed_state(self, state: State) -> dict[str, Any]:
        """The feed's state. ValueError: feed and trainer are not at the same step."""
        feed: dict[str, Any] = self._feed.get_state()
        trained = int(jax.device_get(state.step))
        if trained != feed["step"]:
            raise ValueError(
                f"a checkpoint needs trainer and feed at the same step, but the trainer has done {trained} and "
                f"the feed has delivered {feed['step']}; begin with a new feed, and save after a step, before you "
                "take the next batch"
            )
        return feed

    def _over_the_mesh(self, leaf: jax.Array) -> jax.Array:
        """Relabel a replicated array as replicated over the mesh of all processes. Copies no data.

        With several processes, the arrays that pmap returns are replicated only over the devices of one process,
        and Orbax refuses them.
        """
        if not leaf.sharding.is_fully_replicated:
            return leaf
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._replicated, shards)

    @contextlib.contextmanager
    def _read_errors(self, folder: Path) -> Iterator[None]:
        """Turn any error into a `FeedError` that names the checkpoint from which training can continue."""
        try:
            yield
        except Exception as error:
            older = [step for step in self._manager.all_steps() if step < int(folder.name)]
            way_out = "there is no older one: restore it from a copy, or begin again in another directory"
            if older:
                way_out = f"remove its folder to go on from step {max(older)}"
            raise _error(f"the checkpoint is damaged, or cannot be read ({error}); {way_out}", folder) from error

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turn errors of a save into a `FeedError`. TensorStore raises ValueError even for a full disk."""
        try:
            yield
        except (ValueError, OSError) as error:
            code = re.search(r"os_error_code='(\d+)'", str(error))
            number = int(code[1]) if code else getattr(error, "errno", None)
            newest = self._manager.latest_step()
            raise _error(
                f"a checkpoint could not be written: {os.strerror(number) if number else error}. Newest complete "
                f"checkpoint: {'none' if newest is None else f'step {newest}'}; make room or choose another "
                "directory, and start again",
                self._directory,
            ) from error


def _error(message: str, file: Path) -> FeedError:
    return FeedError(message, stage="checkpoint", process=jax.process_index(), file=str(file))


def _named(state: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a state with names such as "params.weights"."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _checksums(state: State, feed: dict[str, Any]) -> dict[str, int]:
    """Checksums of the arrays, by name, and of the feed's state without its lanes: the same on any topology."""
    sums = jax.device_get(_sums(jax.tree.leaves(state)))
    found = {name: int(number) for (name, _), number in zip(_named(state), sums, strict=True)}
    place = {key: feed[key] for key in feed if key not in ("lanes", "writers")}
    return {**found, "feed": zlib.crc32(json.dumps(place, sort_keys=True).encode())}


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(leaf: jax.Array) -> jax.Array:
    """Σ bits × (2 × place + 1) modulo 2^32. Any single flipped bit changes the sum, since the factor is odd."""
    leaf = _key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize == 1:
        leaf = leaf.astype(jnp.float32)  # exact; JAX cannot convert the bits of bool and of four-bit dtypes
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)


def _key_data(leaf: Any) -> Any:
    """The numbers of a random key, which some optimizers hold; any other array unchanged."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _check_same_arrays(folder: Path, saved: Any, like: State) -> None:
    """Compare the metadata of a checkpoint's arrays with `like`, before Orbax reads the arrays."""
    theirs = {leaf.name: f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(saved)}
    as_saved = jax.eval_shape(lambda state: jax.tree.map(_key_data, state), like)
    ours = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(as_saved)}
    for name in {**ours, **theirs}:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the checkpoint {folder} was made with another model: its {name.removesuffix('.value')} is "
                f"{theirs.get(name, 'missing')}, this run's is {ours.get(name, 'missing')}. Give the sizes that "
                "it was trained with, or another directory"
            )


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Lock a directory in a `with` block, since a second run would delete the checkpoints of the first run.

    Creates a missing directory. The kernel unlocks it when the process ends, even by SIGKILL. Not tested on NFS.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("a+b", buffering=0)
    except OSError as error:
        raise OSError(
            f"checkpoints need a directory that can be written to, and {directory} is not one ({error}); choose "
            "another directory"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            file.seek(0)
            holder = (file.read(1 << 10) or b"an unknown process").decode(errors="replace").strip()
        raise _error(
            f"a directory of checkpoints belongs to one run at a time, and another run uses it: {holder}; wait "
            "for its end, or choose another directory",
            directory,
        ) from error
    except OSError as error:
        _log.warning("%s has no file locks (%s): give no other run this directory", directory, error.strerror)
    process = os.getpid()
    with file:
        with contextlib.suppress(OSError):  # the disk is full
            file.truncate(0)
            file.write(f"process {process} on {socket.gethostname()}, since {time.strftime('%F %T')}\n".encode())
        try:
            yield
        finally:  # while a forked process has the file open, closing alone does not unlock it
            if os.getpid() == process:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def _check_shared(directory: Path) -> None:
    """Check that all processes see the lock of process 0; otherwise Orbax would wait for files of other hosts."""
    service = coordination()
    if service is None:
        return
    lock, key = directory / _LOCK, counted("checkpoints", range(service.processes))
    if service.process == 0:
        service.set(key, lock.read_text())
    expected, until_s = service.get(key, _FOREVER_S), time.monotonic() + _SEEN_S
    while not lock.exists() or lock.read_text() != expected:
        if time.monotonic() > until_s:
            raise _error(
                "all processes must share the directory of checkpoints, and this process does not see the file "
                f"{_LOCK} that process 0 has written there; give a folder of a file system that all hosts mount",
                directory,
            )
        time.sleep(0.1)
