"""The manifest of a conversion: what is converted, and then a line for each finished shard."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NAME = "conversion.jsonl"
Shards = dict[int, dict[str, Any]]
"""The lines of finished shards, by number."""


class Manifest:
    """The open manifest of a folder, which this process locks. Create it in a `with` block.

    It is a kernel lock (flock), which the kernel releases when the process ends, even by SIGKILL.

    Args:
      folder: is created if it does not exist.
      description: JSON values that identify the conversion.

    Attributes:
      shards: those that are finished.

    Raises:
      ValueError: the folder holds another conversion, or another process writes it.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / NAME).open("a+b", buffering=0)
        try:
            self._lock(folder)
            lines = read_lines(folder)
            if lines:
                check_same(folder, lines[0], description)
            self.shards = shards_in(lines)
            self._file.truncate(sum(len(_line(line)) for line in lines))  # a killed run may leave half a line
            if not lines:
                self._append(description)
        except BaseException:
            self._file.close()
            raise

    def add(self, shard: dict[str, Any]) -> None:
        """Note a finished shard, or one that was compared with the source.

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

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(_line(line))
        os.fsync(self._file.fileno())

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"only one process at a time may run a conversion into {folder}, and another one does; wait "
                "for it, or choose another destination"
            ) from None
        if not (folder / NAME).exists():  # renamed since it was opened
            raise ValueError(f"another process has just finished the conversion into {folder}; run this one again")


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of the manifest of a folder; empty if it has none.

    Raises:
      ValueError: it is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return []
    *complete, _ = path.read_bytes().split(b"\n")
    try:
        return [_parsed(line, number) for number, line in enumerate(complete)]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; delete {folder}, or choose another destination"
        ) from error


def shards_in(lines: Sequence[dict[str, Any]]) -> Shards:
    """The shards that the lines of a manifest tell of; the last line of a shard counts."""
    return {line["shard"]: line for line in lines[1:]}


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    """A line of the manifest; line 0 describes the conversion, and any other one a shard."""
    found: dict[str, Any] = json.loads(line)
    is_shard = (
        isinstance(found, dict)
        and type(found.get("shard")) is int
        and isinstance(found.get("digest"), str)
        and isinstance(found.get("files"), str | None)
    )
    if not (is_shard if number else isinstance(found, dict)):
        raise ValueError(f"line {number + 1} is no {'shard with its digest' if number else 'JSON object'}")
    return found


def check_same(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another conversion. The error names the fields that differ."""
    differing = [name for name in here if there.get(name) != here[name]]
    if differing:
        listed = "; ".join(_difference(name, there.get(name), here[name]) for name in differing)
        raise ValueError(
            f"{folder} holds another conversion, or the source has changed: {listed}. Delete it, or choose "
            "another destination"
        )


def _difference(name: str, there: Any, here: Any) -> str:
    if name == "source":
        return "the data of the source differ"
    if name == "sampled_rows":
        return "the source gives other values for its first, middle or last row"
    return f"{name} is {there} there and {here} here"


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode() + b"\n"
