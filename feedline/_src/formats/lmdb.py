"""LMDB files: their entries as rows of bytes, in the order of the keys.

LMDB finds an entry by its key and not by its number, so all keys are read when a file is opened. A process can
have a file open once, so each read opens it, one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from feedline._src.files.file import File
from feedline._src.formats import extras
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import ByteColumn, Grouped
from feedline._src.rows.shards import Indices
from feedline._src.runtime.ending import check_may_read

T = TypeVar("T")
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def open_lmdb(file: File, options: OpenOptions) -> Grouped:
    """The entries of a file: columns "key" and "value". Objects in a store are fetched whole.

    Raises:
      ValueError: it cannot be read or is truncated.
    """
    names = options.chosen(["key", "value"], file.name)
    found = _used(file, lambda entries: list(entries.cursor().iternext(values=False)))
    keys = ByteColumn(np.cumsum([0, *map(len, found)]), np.frombuffer(b"".join(found), np.uint8))

    def values_of(rows: Indices) -> list[bytes]:
        values: list[bytes] = _used(file, lambda entries: [entries.get(key) for key in keys.take(rows)])
        if None in values:
            raise ValueError("an entry is gone; the file is damaged, write it again")
        return values

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[list[bytes]]:
        return [keys.take(rows) if names[leaf] == "key" else values_of(rows) for leaf in leaves]

    def read(leaf: int, group: int) -> ByteColumn:
        raise NotImplementedError("rows are read by read_rows")

    names.sort()  # as JAX numbers the leaves of a dict
    return Grouped(dict.fromkeys(names, "bytes"), [[keys.rows]] * len(names), read, read_rows)


FORMAT = Format("lmdb", (".lmdb", ".mdb"), takes=frozenset({"columns"}), extra="lmdb", open=open_lmdb)


def _used(file: File, use: Callable[[Any], T]) -> T:
    """What `use` returns of a transaction, in which no other thread uses LMDB."""

    def used(path: str) -> T:
        with _opened(file, path) as entries:
            return use(entries)

    return file.with_path(used)


@contextlib.contextmanager
def _opened(file: File, path: str) -> Iterator[Any]:
    """A transaction, for the length of a `with` block, in which no other thread uses LMDB."""
    lmdb = extras.require("lmdb", "lmdb")
    with _lock, contextlib.ExitStack() as stack:
        check_may_read()
        try:
            env = stack.enter_context(lmdb.open(path, subdir=False, readonly=True, lock=False, create=False))
            needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if needed > (size := os.stat(path).st_size):  # LMDB would read beyond its end
                raise ValueError(f"{file.name} must have {needed} bytes, and has {size}; it is truncated")
            yield stack.enter_context(env.begin())
        except lmdb.Error as error:
            code = getattr(error, "code", None)
            if code in (errno.EMFILE, errno.ENFILE):
                raise OSError(code, os.strerror(code), file.name) from error
            raise ValueError(
                f"{file.name} cannot be read as an LMDB file: {error}; close it where this process has it open, "
                "or write it again if it is damaged"
            ) from error
