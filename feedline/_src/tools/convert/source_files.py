"""The state of the files that a source reads: while it is the same, so are the rows."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from feedline._src.rows.indexed import Indexed
from feedline._src.sources.decoded import DecodedSource
from feedline._src.stores.urls import is_url


def state_of_files(source: Any) -> str | None:
    """A digest of paths, inodes, sizes and times of all files that the rows are made of.

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
