"""Files that are one row each: in a folder, in its class folders (with labels), or found by a glob."""

from __future__ import annotations

import bisect
import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from feedline._src.files.client import Listed
from feedline._src.files.file import irregular
from feedline._src.files.folder import Folder, folder_of, listed_folder
from feedline._src.files.store import Store
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices
from feedline._src.rows.source import EncodedSource, Record, WillRead

_SAMPLED_FILES = 64


class FolderSource(EncodedSource):
    """An `EncodedSource` whose records are whole files. Memory per file: its name, a version and about 24 bytes.

    No descriptor stays open. Reading a file that was deleted, or has changed since it was listed or first read,
    raises a `FeedError`.

    Attributes:
      classes: the names of the class folders in sorted order, or None. A label is an index into this list.

    Args:
      class_ends: for each class, the index of its last row, plus 1.
    """

    def __init__(
        self, folder: Folder, classes: Sequence[str] | None = None, class_ends: Sequence[int] = ()
    ) -> None:
        self._folder, self.classes, self._class_ends = folder, classes, class_ends
        self._paths = [folder.name]
        self.fields = None if classes is None else ("file", "label")

    @property
    def identity(self) -> dict[str, Any]:
        """Classes, all file names relative to the folder, and the sizes and sampled bytes of up to 64 files."""
        files = self._folder.digests(digests.sampled(len(self), _SAMPLED_FILES))
        classes = {} if self.classes is None else {"classes": self.classes}  # names do not show empty classes
        return {"kind": "files", "count": len(self), "names": self._folder.names.digest, "files": files, **classes}

    @property
    def files(self) -> Iterable[str]:
        """The paths of the files, in the order of the rows."""
        return map(self.file_of, range(len(self)))

    def __len__(self) -> int:
        return len(self._folder.names)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The files of these rows, as bytes or as {"file": bytes, "label": int}.

        Raises:
          IndexError: one of these rows does not exist.
          RowError: a file cannot be read.
          FeedError: a file was changed or deleted, a store cannot be read, or too many files are open.
        """
        self.check_range(rows)
        files = [data or b"" for data in self._folder.read(rows.tolist())]
        if self.classes is None:
            return files
        labels = np.searchsorted(self._class_ends, rows, side="right").tolist()
        return [{"file": file, "label": label} for file, label in zip(files, labels, strict=True)]

    @property
    def will_read(self) -> WillRead | None:
        """Fetches objects from a store in advance; None for local files."""
        return self._fetch_ahead if self._folder.in_store else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        return self._folder.will_read(rows.tolist(), ahead)

    def file_of(self, row: int) -> str:
        """The path or address of the row's file."""
        return self._folder.path_of(row)

    def close(self) -> None:
        """Cancel what is being fetched."""
        self._folder.close()

    def _described(self) -> list[tuple[str, str]]:
        if self.classes is None:
            return super()._described()
        return [("file", "bytes"), ("label", f"int of {len(self.classes)} classes")]

    def __reduce__(self) -> Any:
        return FolderSource, (self._folder, self.classes, self._class_ends)


def open_folder(address: str, store: Store | None) -> FolderSource:
    """Open all files of a folder, or of its class folders, in sorted order, without hidden files.

    Raises:
      ValueError: no files, files at several depths, a broken link, or a web server, which cannot list files.
      FeedError: a store cannot be read.
    """
    folder = listed_folder(address.rstrip("/") or "/", store)
    names, depths = folder.names, folder.names.depths
    if len(names) == 0:
        raise ValueError(
            f"a source must have at least one row, and the folder {folder.name} has no files except hidden ones; "
            "check the path"
        )
    if not depths.any():
        return FolderSource(folder)
    if not depths.all() or depths.max() > 1:
        least, most = names[int(np.argmin(depths))], names[int(np.argmax(depths))]
        if least == "dataset_dict.json":  # written by Hugging Face's DatasetDict.save_to_disk
            split = f"{folder.name}/{most.partition('/')[0]}"
            raise ValueError(
                f"a source is the dataset of one split, and {folder.name} has a folder for each split; open "
                f"one of them: open_source({split!r})"
            )
        raise ValueError(
            f"the files of a folder must all lie directly in it, or all in class folders, and {folder.name} has "
            f"{least} and {most}; move one of them away, open a folder whose folders are the classes, or open "
            f"files by a glob, which gives no labels: open_source({f'{glob.escape(folder.name)}/**/*.jpg'!r})"
        )
    classes = sorted((name for name in folder.folders() if not name.startswith(".")), key=os.fsencode)
    ends = [bisect.bisect_right(names, os.fsencode(name), key=_class_of) for name in classes]
    return FolderSource(folder, classes, ends)


def _class_of(name: str) -> bytes:
    return os.fsencode(name.partition("/")[0])


def open_files(files: Sequence[str] | Sequence[Listed], store: Store | None) -> FolderSource:
    """Open local files or listed objects, in this order, without labels. ValueError: one is not a regular file."""
    for file in files:
        if not isinstance(file, str) or os.path.isfile(file) or not os.path.exists(file):
            continue  # a broken link raises an error when it is read
        if not os.path.isdir(file):
            raise irregular(file)
        raise ValueError(
            f"a glob must match files, and {file} is a folder; open a folder of class folders by its own "
            f"path: open_source({os.path.dirname(file) or '.'!r})"
        )
    return FolderSource(folder_of(files, store))
