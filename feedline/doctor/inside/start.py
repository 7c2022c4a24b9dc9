"""Called when Python starts in a process of the command. Imports jax no earlier than the script does."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def start(folder: str) -> None:
    """Observe this process as soon as it has imported jax.

    Args:
      folder: where the record of this process is written.
    """
    sys.meta_path.insert(0, _AfterJax(lambda: _observe(Path(folder))))


def _observe(folder: Path) -> None:
    """Install all hooks. Runs right after `import jax`, before any device is used."""
    from feedline.doctor.inside import compiled, fetches
    from feedline.doctor.inside.record import Record

    record = Record(folder)
    fetches.install(record)
    compiled.install(record)
    atexit.register(record.write)
    leave = os._exit

    def write_and_leave(status: int) -> Any:  # atexit does not run then
        record.write()
        leave(status)

    os._exit = write_and_leave


class _AfterJax(importlib.abc.MetaPathFinder):
    """Finds jax as usual, and calls `then` once its module has been executed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        usual = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            usual(module)
            self._then()

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
