"""The files in which a checkpoint stores a feed's state: one for each lane of a stream, else a single file."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_FILE = "metadata"  # as in Orbax's JsonSave and JsonRestore, so feedline and Orbax can read each other's files


def save_lanes(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write the lanes that this process has to save, each to a file `lane-<l>-of-<count>.json`.

    Every process calls this with its own state and the same folder, which all of them must be able to read later.
    Of the processes that read a lane, the one with the lowest index writes it. A file appears whole or not at all,
    and has a checksum. Give each step of each stream a folder of its own, because `load_lanes` refuses a folder
    whose files have different steps or positions. Several threads may save at the same time, in any order.

    Args:
      state: from `feed.get_state()` on this process, or from `load_lanes`. It may be saved later, on any thread.
      folder: created if it does not exist. A folder in a bucket must be an `etils.epath.Path`.

    Raises:
      ValueError: `state` is not the state of a stream.
      TypeError: the state of an iterator does not consist of JSON values.
      OSError: a file cannot be written. The error names the file; no part of the file is left.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> state = {"step": 5, "position": 40, "lanes": {"0": {"next_index": 40}}, "writers": [0]}
      >>> save_lanes(state, folder)
      >>> load_lanes(folder)
      {'step': 5, 'position': 40, 'lanes': {'0': {'next_index': 40}}, 'writers': [0]}
    """
    if "lanes" not in state or "writers" not in state:
        raise ValueError(
            "save_lanes takes the state of a stream, and this one has no lanes. Such a state is the same on every "
            "process; save it as JSON on one process"
        )
    path = _as_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    place = {name: value for name, value in state.items() if name not in ("lanes", "writers")}
    count = len(state["writers"])
    for lane, iterator in state["lanes"].items():
        if state["writers"][int(lane)] == jax.process_index():
            file = {**place, "lane": int(lane), "count": count, "iterator": iterator}
            try:
                text = json.dumps({**file, "checksum": _checksum(file)})
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"get_state of an iterator must return JSON values, and that of lane {lane} did not: {error}; "
                    "convert NumPy's numbers with int() or float(), and arrays with tolist()"
                ) from error
            _write(path / f"lane-{int(lane):05}-of-{count:05}.json", text)


def load_lanes(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state that all processes saved to `folder`. `feed.set_state` accepts it on any topology.

    The result is the same on every process; saved again, process 0 writes all. `save_lanes` has an example.

    Raises:
      FileNotFoundError: the folder has no files of lanes.
      ValueError: a lane is missing or damaged, or two files are of different steps.
    """
    paths = sorted(_as_path(folder).glob("lane-*-of-*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no file lane-*-of-*.json; save_lanes writes them, on every process")
    saved = [_read(path) for path in paths]
    lanes = {file.pop("lane"): file.pop("iterator") for file in saved}
    place = saved[0]
    for file, path in zip(saved, paths, strict=True):
        for field in {**place, **file}:
            if file.get(field) != place.get(field):
                raise ValueError(
                    f"the lanes of a checkpoint must be of one step, and {path.name} has {field} "
                    f"{file.get(field)!r}, but {paths[0].name} has {place.get(field)!r}: {folder} holds files of "
                    "two saves, or of one that was interrupted; restore an older folder, and save each step to a "
                    "folder of its own"
                )
    count = place.pop("count")
    missing = next((lane for lane in range(count) if lane not in lanes), None)
    if missing is not None:
        raise ValueError(
            f"a checkpoint must hold all {count} lanes, and {folder} lacks {count - len(lanes)} of them, the "
            f"first being lane {missing}: a save was interrupted, or left out a process; restore an older folder"
        )
    return {**place, "lanes": {str(lane): lanes[lane] for lane in range(count)}, "writers": [0] * count}


def write_state(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state. Every process calls it, with a folder that all of them share."""
    if "lanes" in state:
        save_lanes(state, folder)
    elif jax.process_index() == 0:
        (_as_path(folder) / _FILE).write_text(json.dumps(state))


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state from a folder.

    Raises:
      FileNotFoundError: the folder contains no state of a feed.
      ValueError: the state is damaged, or a lane is missing.
    """
    try:
        return dict(json.loads((_as_path(folder) / _FILE).read_text()))
    except FileNotFoundError:
        return load_lanes(folder)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder}/{_FILE} must be the state of a feed as JSON, and reading it raised {type(error).__name__}: "
            f"{error}; restore an older checkpoint"
        ) from error


def _as_path(folder: str | os.PathLike[str]) -> Any:
    """The folder as a `Path`. In a bucket, it must be an `etils.epath.Path`, which has the same methods."""
    if "://" not in os.fspath(folder):
        return Path(folder)
    if isinstance(folder, str):
        raise ValueError(
            f"a folder in a bucket must be an etils.epath.Path, got a string; pass epath.Path({folder!r})"
        )
    return folder


def _write(path: Any, text: str) -> None:
    """Write a file completely or not at all, even if the machine crashes."""
    if not isinstance(path, Path):
        path.write_text(text)  # an object in a bucket
        return
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")  # another thread may save this lane
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"save_lanes could not write a lane ({os.strerror(error.errno or 0)}), and the folder is not a whole "
            "checkpoint; make room, or save to another folder",
            str(path),
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _checksum(file: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(file).encode())


def _read(path: Any) -> dict[str, Any]:
    try:
        held: dict[str, Any] = json.loads(path.read_text())
        found = f"it is lane {held['lane']!r} of {held['count']!r}"
        checksum = held.pop("checksum", None)
        if type(held["lane"]) is type(held["count"]) is int and 0 <= held["lane"] < held["count"]:
            if checksum == _checksum(held) or (checksum is None and "iterator" in held):  # older files have none
                return held
            found = "it is not as it was saved"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is not a file that save_lanes wrote: {found}; restore an older folder")
