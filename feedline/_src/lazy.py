"""Public modules whose names are imported on first use, so they import fast (Scientific Python's SPEC 1)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    module: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a public module.

    Args:
      module: the module's name.
      where: {public name: the module that defines it}; "" if the name is itself a module under `module`.
    """

    def resolve(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        holder = where[name]
        value: Any = importlib.import_module(holder or f"{module}.{name}")
        if holder:
            value = getattr(value, name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve, lambda: sorted({*vars(sys.modules[module]), *where}), [*where]
