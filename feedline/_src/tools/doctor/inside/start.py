"""Called when Python starts in a process of the command. Imports jax no earlier than the script does."""

from __future__ import annotations

import atexit
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def start(folder: str) -> None:
    """Observe this process as soon as it has imported jax.

    Args:
      folder: where the record of this process is written.
    """
    if "jax" in sys.modules:  # a sitecustomize of the user's has imported it
        _observe(Path(folder))
    else:
        sys.meta_path.insert(0, _AfterImport(Path(folder)))


def _observe(folder: Path) -> None:
    """Wrap jax's functions. Runs right after `import jax`, before any device is used."""
    try:
        from feedline._src.tools.doctor.inside import watched
        from feedline._src.tools.doctor.inside.record import Record

        record = Record(folder)
        watched.install(record)
        atexit.register(record.write)
    except Exception as error:  # noqa: BLE001  the reason is reported, and the job imports jax all the same
        (folder / "not_observed.txt").write_text(f"the doctor failed: {type(error).__name__}: {error}")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds jax as usual, and begins to observe once it has been executed.

    It stays until then: `importlib.util.find_spec("jax")` looks for jax without importing it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "jax":
            return None
        further = sys.meta_path[sys.meta_path.index(self) + 1 :]  # the finders before this one did not find it
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in further)), None)
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                usual(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _observe(self._folder)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
