"""A file on local disk."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from feedline._src.files.file import Bytes, File, Indices, place_in
from feedline._src.files.open_files import OpenFiles, pread
from feedline._src.files.opening import opening
from feedline._src.files.store import Store
from feedline._src.files.version import FileVersion


class LocalFile(File):
    """A `File` on local disk.

    Args:
      name: its path.
      version: that it must have; None: the present one.
      opened: of the files of one source, those that were used last, open.

    Raises:
      FileNotFoundError, OSError: it cannot be opened.
      ValueError: it is a folder.
      FeedError: it has another version.
    """

    def __init__(self, name: str, version: FileVersion | None = None, opened: OpenFiles | None = None) -> None:
        self.name, self._place = name, os.path.abspath(name)
        if version is None:
            with opening(Path(name)) as file:
                version = FileVersion.of_open(file.fileno())
        else:
            version.check(name)
        self.version: FileVersion = version
        self.size = version.size_bytes
        self._opened = opened or OpenFiles()
        self._memory: Bytes | None = None

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """See `File.read`."""
        file = self._opened.get(self.name, self.version)
        found = file.read(offsets, lengths)
        file.check()
        return found

    def memory(self) -> Bytes:
        """All bytes, mapped when this is called first. One descriptor stays open."""
        if self._memory is None:
            with opening(Path(self.name)) as file:
                self.version.compare(FileVersion.of_open(file.fileno()), self.name)
                mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
                self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory

    def path(self) -> str:
        """Its own path."""
        return self.name

    @property
    def has_path(self) -> bool:
        """True: nothing is fetched."""
        return True

    def open(self, sequential: bool = False) -> BinaryIO:
        """The file, open. Errors as of `File.check`."""
        file = open(self.name, "rb")  # noqa: SIM115  # the caller closes it
        try:
            self.version.compare(FileVersion.of_open(file.fileno()), self.name)
        except BaseException:
            file.close()
            raise
        return file

    def samples(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """See `File.samples`."""
        with self.open() as file:
            return [pread(file.fileno(), length, offset) for offset, length in ranges]

    @property
    def stamp(self) -> int:
        """Its time of modification in ns."""
        return self.version.modified_ns

    def places_beside(self, suffix: str) -> list[str]:
        """See `File.places_beside`. The name is hidden, so that globs and folders of files leave it out."""
        folder, name = os.path.split(self.name)
        beside = os.path.join(folder, f".{name}{suffix}")
        return [beside, place_in(Store().folder, os.path.abspath(self.name), suffix)]

    def check(self) -> None:
        """See `File.check`. The working directory may be another one since the file was opened."""
        self.version.check(self._place)

    def check_open(self) -> None:
        """See `File.check_open`."""
        self.version.check_open(self._place)

    def __reduce__(self) -> Any:
        return LocalFile, (os.fspath(self.name), self.version)
