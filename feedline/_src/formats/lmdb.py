"""LMDB files: their entries as rows of bytes, in the order of the keys.

LMDB finds an entry by its key and not by its number, so all keys are read when a file is opened. A process must
not have a file open twice at once, so each read opens and closes it, and only one thread reads at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from feedline._src.files.file import File
from feedline._src.files.files import Files
from feedline._src.files.store import Store, is_url
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library
from feedline._src.formats.table import Column, Grouped, by_rows
from feedline._src.rows.shards import Indices
from feedline._src.runtime.exit import check_may_read

T = TypeVar("T")
_DATA, _OTHER = "data.mdb", "lock.mdb"
"""The files in the folder that LMDB writes by default."""
_CHECKED_KEYS = 100
"""A key may be the name of a database. Only this many of the first keys are checked, at some µs each."""
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
lmdb: Any = Library("lmdb", "lmdb")


def open_lmdb(file: File, options: OpenOptions) -> Grouped:
    """The entries of a file: columns "key" and "value". Objects in a store are fetched whole."""
    names = sorted(options.chosen(["key", "value"], file.name))  # the order of a dict's leaves in JAX

    def keys_of(env: Any, entries: Any) -> list[bytes]:
        found = list(entries.cursor().iternext(values=False))
        for key in [key for key in found[:_CHECKED_KEYS] if b"\0" not in key]:  # LMDB allows no NUL in names
            with contextlib.suppress(lmdb.IncompatibleError):  # raised for plain entries; LMDB has no other test
                env.open_db(key, entries, create=False)
                raise ValueError(
                    f"the entries of an LMDB file must lie in its unnamed database, and {file.name} has a "
                    f"database named {key!r}; copy its entries into a file of their own: new.put(key, value)"
                )
        return found

    found = _used(file, keys_of)
    keys = Column(np.frombuffer(b"".join(found), np.uint8), np.cumsum([0, *map(len, found)]))

    def values_of(rows: Indices) -> list[bytes]:
        values: list[bytes] = _used(file, lambda _, entries: [entries.get(key) for key in keys.take(rows)])
        if None in values:
            raise ValueError("an entry is gone; the file is damaged, write it again")
        return values

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[list[bytes]]:
        return [keys.take(rows) if names[leaf] == "key" else values_of(rows) for leaf in leaves]

    return by_rows(dict.fromkeys(names, "bytes"), keys.rows, read_rows, instead="")


def _files(paths: Sequence[str], store: Store | None) -> Files:
    """Open the files; of a folder, its data file. Skip lock files, which a glob may match."""
    data = [path for path in paths if os.path.basename(path) != _OTHER] or paths
    folders = [not is_url(path) and os.path.isdir(path) for path in data]
    return Files([os.path.join(path, _DATA) if f else path for path, f in zip(data, folders, strict=True)], store)


FORMAT = Format(
    "lmdb", (".lmdb", ".mdb"), takes=frozenset({"columns"}), extra="lmdb", open=open_lmdb, files=_files
)


def _used(file: File, use: Callable[[Any, Any], T]) -> T:
    """Call `use` with an environment and a transaction while no other thread uses LMDB; return the result."""

    def used(path: str) -> T:
        try:
            with _lock, lmdb.open(path, subdir=False, readonly=True, lock=False, create=False, max_dbs=1) as env:
                check_may_read()
                needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
                if needed > (size := os.stat(path).st_size):  # LMDB would read beyond the file's end
                    raise ValueError(f"{file.name} must have {needed} bytes, and has {size}; it is truncated")
                with env.begin() as entries:
                    return use(env, entries)
        except lmdb.Error as error:
            code = getattr(error, "code", None)
            if code in (errno.EMFILE, errno.ENFILE):
                raise OSError(code, os.strerror(code), file.name) from error
            raise ValueError(
                f"{file.name} cannot be read as an LMDB file: {error}; close it where this process has it open, "
                "or write it again if it is damaged"
            ) from error

    return file.with_path(used)
