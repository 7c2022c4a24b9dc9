"""Called when Python starts in a process of the command. Imports jax no earlier than the script does."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def start(folder: str) -> None:
    """Observe this process as soon as it has imported jax.

    Args:
      folder: where the record of this process is written.
    """
    if "jax" in sys.modules:  # a sitecustomize of the user's has imported it
        _observe(Path(folder))
    else:
        sys.meta_path.insert(0, _AfterImport("jax", lambda: _observe(Path(folder))))


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
    """Finds a module as usual, and calls `then` once it has been executed. It must not be imported yet."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
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
