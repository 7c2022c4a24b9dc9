"""The manifest of a conversion: what is converted, which shards are finished, and the state of its source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from feedline._src.files.store import is_url
from feedline._src.rows.indexed import Indexed
from feedline._src.sources.decoded import DecodedSource

NAME = "conversion.jsonl"


class Manifest:
    """The manifest of a folder: a line of JSON for the conversion, and one for each shard; a context manager.

    Until the conversion is finished, this process locks the manifest by flock(2). The kernel releases the lock
    when the process ends, even by SIGKILL.

    Args:
      folder: is created if it does not exist.
      destination: the folder of the result. If `folder` is this, the manifest is only read, which other processes
        may do at the same time; else `folder` is renamed to it by whoever finishes the conversion.
      description: JSON values that identify the conversion.

    Attributes:
      finished: `folder` is the destination.
      shards: the lines of finished shards, by number; the last line of a shard counts.

    Raises:
      ValueError: the folder holds another conversion, another process writes or has just finished it, or the
        manifest is damaged.
    """

    def __init__(self, folder: Path, destination: Path, description: Mapping[str, Any]) -> None:
        self.finished = finished = folder == destination
        if not finished:
            _refuse_finished(destination)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / NAME
        self._file = self._path.open("rb" if finished else "a+b", buffering=0)
        try:
            if not finished:
                self._lock()
                _refuse_finished(destination)  # the previous holder of the lock may have renamed the folder
            self._file.seek(0)
            *lines, half = self._file.read().split(b"\n")
            if half and not finished:  # of a killed run
                self._file.truncate(self._file.tell() - len(half))
            found = [self._parsed(*each) for each in enumerate(lines)]
            if found:
                self._check_same(found[0], description)
            elif not finished:
                self._append(description)
            self.shards = {line["shard"]: line for line in found[1:]}
        except BaseException:
            self._file.close()
            raise

    def add(self, shard: dict[str, Any]) -> None:
        """Record a finished shard, or one that was compared with the source.

        Args:
          shard: {"shard": number, "digest": of its rows in the source, "files": state of the source's files, or
            None}.
        """
        self.shards[shard["shard"]] = shard
        self._append(shard)

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, sort_keys=True).encode() + b"\n"
        while line:  # on a disk that is nearly full, a write may be short before the next one fails
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        folder = self._path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"only one process at a time may run a conversion into {folder}, and another one does; wait "
                "for it, or choose another destination"
            ) from None

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        """A line: of the conversion if it is the first, else of a shard. ValueError: it is damaged."""
        try:
            found: dict[str, Any] = json.loads(line)
            is_shard = type(found.get("shard")) is int and isinstance(found.get("digest"), str)
            if number and not (is_shard and isinstance(found.get("files"), str | None)):
                raise ValueError(f"line {number + 1} is no shard with its digest")
        except (ValueError, AttributeError, RecursionError) as error:
            remedy = f"delete {self._path.parent}, or choose another destination"
            raise ValueError(f"{self._path} cannot be read: {error}; {remedy}") from error
        return found

    def _check_same(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Refuse another conversion. The error names the fields that differ."""
        hidden = {
            "source": "the data of the source differ",
            "sampled_rows": "the source gives other values for its first, middle or last row",
        }
        differing = [
            hidden.get(name, f"{name} is {there.get(name)} there and {value} here")
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"{self._path.parent} holds another conversion, or the source has changed: "
                f"{'; '.join(differing)}. Delete it, or choose another destination"
            )


def _refuse_finished(destination: Path) -> None:
    """Raise ValueError if the destination exists, where it did not when the plan was made."""
    if os.path.lexists(destination):
        raise ValueError(
            f"another process has just finished the conversion into {destination}, or has created that folder for "
            "something else; run this one again"
        )


def state_of_files(source: Any) -> str | None:
    """A digest of paths, inodes, sizes and times of all files of a source. While it is unchanged, so are the rows.

    Take it before rows are read and before `source.identity`, which refuses files that were replaced since they
    were opened. A change of a file with the same size and time of modification (`rsync -t`) shows in its ctime.

    Returns:
      None: not all rows are made of local files alone, such as arrays in memory or a source of the user.
    """
    paths = _files_of(source)
    if paths is None:
        return None
    hashed = hashlib.sha256()
    for path in _in_folders(paths):
        if is_url(path):
            return None
        found = os.stat(path)
        state = [path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        hashed.update(json.dumps(state).encode())
    if isinstance(source, DecodedSource):
        hashed.update(pickle.dumps(source.decode))  # the arguments of a decoder, or the name of a function
    return hashed.hexdigest()


def _files_of(source: Any) -> Iterable[str] | None:
    """The files and folders of which the rows are made; the module of a decoder is one of them."""
    if not isinstance(source, DecodedSource):
        return source.files if isinstance(source, Indexed) else None
    paths, module = _files_of(source.encoded), _module_of(source.decode)
    return None if paths is None or module is None else [*paths, module]


def _module_of(decode: Any) -> str | None:
    """The file that defines a decoder; None: it is unknown, or the decoder cannot be sent to another process."""
    try:
        pickle.dumps(decode)
        while isinstance(decode, functools.partial):
            decode = decode.func
        return inspect.getsourcefile(decode if inspect.isroutine(decode) else type(decode))
    except (pickle.PicklingError, TypeError, AttributeError, OSError):
        return None


def _in_folders(paths: Iterable[str]) -> Iterator[str]:
    """The files, and all that lie in the folders."""
    for path in paths:
        yield path
        for folder, inside, names in os.walk(path, followlinks=True):
            inside.sort()
            yield from (os.path.join(folder, name) for name in sorted(names))
