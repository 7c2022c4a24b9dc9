"""`Format`, which each module of a format declares; the look-up of formats by suffix; lazy imports of libraries.

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
      way: how rows are read; "grouped" also if only some files of the format can be mapped.
      open: (file, options) → the file's arrays or groups. Raises ValueError or TypeError, which name the file, if
        it is damaged, in another format, or has no rows of numbers or bytes; FeedError if it changed, or its store
        cannot be read. None if the source or `open_first` opens the files.
      open_first: (first nonempty file, options) → `open` for all files, if that file determines what rows hold.
      files: (paths, store) → a sequence of files; each of them is a `file` for `open`.
      head_bytes, tail_bytes: how many bytes at the start or the end of a file `open` reads first. For objects in a
        store, these bytes of all files are fetched at once.

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
    """Files for a library that needs local paths: objects in a store are fetched whole, all at once."""
    files = Files(paths, store)
    files.fetch_whole()
    return files


@functools.cache
def formats() -> dict[str, Format]:
    """All formats, by the suffixes of their files. Imports the formats' modules, but not their libraries."""
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
    """Import `module`, which `pip install '.[extra]'` in a clone of feedline installs.

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
    """A module that is imported by `require` when it is first used. It takes the arguments of `require`."""

    def __init__(self, module: str, extra: str) -> None:
        self._module, self._extra = module, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(require(self._module, self._extra), name)
