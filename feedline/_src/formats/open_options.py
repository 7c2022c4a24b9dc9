"""The options of `feedline.open_source`: how to interpret files, and which of their columns to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.files.store import Store
from feedline._src.options import checked_integer

CACHE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class OpenOptions:
    """The validated keyword arguments of `feedline.open_source`, which documents them.

    Raises:
      ValueError, TypeError: a value is invalid.
    """

    dtype: npt.DTypeLike | None = None
    window: int | None = None
    stride: int | None = None
    columns: Sequence[str] | None = None
    cache_bytes: int = CACHE_BYTES
    missing_chunks: str = "error"
    store: Store | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            dtype = np.dtype(self.dtype)
            if dtype.hasobject or dtype.itemsize == 0:
                raise TypeError(f"dtype must have numbers of a fixed size, got {dtype!r}; for example, np.uint16")
            object.__setattr__(self, "dtype", dtype)
        checked_integer("cache_bytes", self.cache_bytes, at_least=0)
        if self.store is not None and not isinstance(self.store, Store):
            raise TypeError(f"store must be a feedline.Store, got {type(self.store).__name__}")
        if self.missing_chunks not in ("error", "fill"):
            raise ValueError(
                f'missing_chunks must be "error", or "fill" for the fill value, got {self.missing_chunks!r}'
            )
        if self.window is not None:
            checked_integer("window", self.window, at_least=1)
        if self.stride is not None:
            checked_integer("stride", self.stride, at_least=1)
            if self.window is None or self.stride > self.window:
                raise ValueError(
                    f"stride is the distance between windows, and must be 1 to window, got stride={self.stride} "
                    f"with window={self.window}; leave stride out for windows that follow each other"
                )
        if self.columns is not None:
            names = tuple(self.columns) if isinstance(self.columns, Iterable) else (self.columns,)
            is_ordered = not isinstance(self.columns, str | set | frozenset)  # a set's order differs by process
            if not is_ordered or not all(isinstance(name, str) for name in names):
                raise TypeError(f"columns must be a sequence of names, got {self.columns!r}; write columns=['x']")
            object.__setattr__(self, "columns", tuple(dict.fromkeys(names)))

    def given(self) -> set[str]:
        """The names of the options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return {field.name for field in fields if getattr(self, field.name) != field.default}

    def chosen(self, names: Sequence[str], of: str) -> list[str]:
        """Return the columns to read from the file `of`, whose columns are `names`.

        Raises:
          ValueError: the file lacks one of `columns`, or `columns` is empty.
        """
        if self.columns is None:
            return list(names)
        missing = [name for name in self.columns if name not in names]
        if missing or not self.columns:
            raise ValueError(
                f"columns must be some of {', '.join(names)} in {of}, got {', '.join(missing) or 'none'}; "
                "leave columns out to read all of them"
            )
        return list(self.columns)

    def named(self, tree: Any, of: str) -> Any:
        """Return the chosen leaves of a dict. A single array becomes a dict if `columns` names it."""
        if isinstance(tree, dict):
            return {name: tree[name] for name in self.chosen(list(tree), of)}
        if self.columns is None:
            return tree
        if len(self.columns) != 1:
            raise ValueError(
                f"{of} holds one array, so columns must have one name for it, got {list(self.columns)}; write "
                "columns=['x']"
            )
        return {self.columns[0]: tree}
