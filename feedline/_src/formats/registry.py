"""Declares `Format`, finds formats by suffix, and imports their libraries lazily.

To add a format, add a module here that declares a `Format`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Literal

from feedline._src.files.files import Files
from feedline._src.files.store import Store

Way = Literal["mapped", "grouped"]


@dataclasses.dataclass(frozen=True)
class Format:
    """What a module declares about its format.

    Attributes:
      name: the format's name, for rules that concern only this format.
      suffixes: the suffixes of its files, the most common one first.
      takes: the options of `open_source` that it supports, besides `store`.
      extra: the extra of pyproject.toml that installs its library; "" if it needs none.
      way: how rows are read. A format of which only some files can be mapped is "grouped".
      open: (file, options) → the file's arrays or groups; None if the source or `open_first` opens the files. If a
        file is damaged, in another format, or has no rows of numbers or bytes, raises a ValueError or TypeError
        that names the file. If the file changed, or its store cannot be read, raises FeedError.
      open_first: (first nonempty file, options) → `open` for all files; set if this file determines the fields.
      files: (paths, store) → a sequence of files, each of which is passed to `open`.
      head_bytes, tail_bytes: how many bytes `open` reads first, at the start or the end of a file. In a store,
        these bytes of all objects are fetched at once.

    Example:
      >>> formats()[".tfrecord"].extra
      'tfrecord'
    """

    name: str
    suffixes: tuple[str, ...]
    takes: frozenset[str] = frozenset()
    extra: str = ""
    way: Way = "grouped"
    open: Callable[..., Any] | None = None
    open_first: Callable[..., Callable[..., Any]] | None = None
    files: Callable[[Sequence[str], Store | None], Any] = Files
    head_bytes: int = 0
    tail_bytes: int = 0


def fetched_files(paths: Sequence[str], store: Store | None) -> Files:
    """Open files for a library that needs local paths. Objects in a store are fetched whole, all at once."""
    files = Files(paths, store)
    files.fetch_whole()
    return files


@functools.cache
def formats() -> dict[str, Format]:
    """Return all formats, by suffix. Imports the formats' modules, but not their libraries."""
    folder = importlib.import_module("feedline._src.formats")
    names = [f"{folder.__name__}.{module.name}" for module in pkgutil.iter_modules(folder.__path__)]
    declared = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return {suffix: form for form in declared if isinstance(form, Format) for suffix in form.suffixes}


def suffix_of(path: str) -> str:
    """The suffix that names the format. "x.tar-00000-of-00128": ".tar"; "x-00000-of-00128": ".tfrecord"."""
    numbered = re.fullmatch(r"(.*)-\d{5,}-of-\d{5,}", PurePath(path).name)
    if numbered is None:
        return PurePath(path).suffix
    suffix = PurePath(numbered[1]).suffix
    return suffix if suffix in formats() else ".tfrecord"


def require(module: str, extra: str) -> Any:
    """Import `module`, which feedline's extra `extra` installs.

    Raises:
      ImportError: the module is not installed.

    Example:
      >>> require("feedline_has_no", "parquet")
      Traceback (most recent call last):
      ImportError: feedline_has_no reads this format and is not installed; from the clone: pip install '.[parquet]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its own dependencies is not
        raise ImportError(
            f"{package} reads this format and is not installed; from the clone: pip install '.[{extra}]'"
        ) from error


class Library:
    """A module that `require` imports on first use. Arguments: see `require`."""

    def __init__(self, module: str, extra: str) -> None:
        self._module, self._extra = module, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(require(self._module, self._extra), name)
