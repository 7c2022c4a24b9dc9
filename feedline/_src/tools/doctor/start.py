"""What runs in each Python process of a command: begins to observe it, or diagnoses its feed.

`begin` is called when Python starts. It imports no jax before the script does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedline._src.feed import Feed

NOT_OBSERVED = "not_observed.txt"


def begin(folder: str, task: str) -> None:
    """Observe or diagnose this process as soon as it has imported jax, and write results into a folder.

    The task is "observe", or "diagnose 8 200" with the batches to take before, and those of the diagnosis.
    """
    install = functools.partial(_install, Path(folder), *task.split())
    if "jax" in sys.modules:  # a sitecustomize of the user's has imported it
        install()
    else:
        sys.meta_path.insert(0, _AfterImport(install))


def _install(folder: Path, task: str, *numbers: str) -> None:
    """Runs right after `import jax`, before any device is used. The job imports jax whatever happens here."""
    try:
        if task == "observe":
            from feedline._src.tools.doctor.observe import Record, install

            install(Record(functools.partial(write, folder)))
        else:
            _Diagnosing(folder, *map(int, numbers))
    except Exception as error:  # noqa: BLE001  the reason is reported
        (folder / NOT_OBSERVED).write_text(f"the doctor failed: {type(error).__name__}: {error}")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds jax as usual, and calls `install` once jax has been executed.

    It stays until then: `importlib.util.find_spec("jax")` looks for jax without importing it.
    """

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install

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
                    self._install()

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def write(folder: Path, result: Any) -> None:
    """Replace this process's file with a result, a JSON value."""
    partial = folder / f"{os.getpid()}.partial"
    partial.write_text(json.dumps(result))
    os.replace(partial, partial.with_suffix(".json"))


class _Diagnosing:
    """Waits for a feed that delivered `before` batches, diagnoses it, and ends the process.

    The process ends by `os._exit`: the model was trained on repeated batches, and must not be saved. Processes of
    one run end together.
    """

    def __init__(self, folder: Path, before: int, steps: int) -> None:
        from feedline._src.feed_options import building

        self._folder, self._before, self._steps = folder, before, steps
        self._diagnosis: Any = None
        self._most_batches = 0  # that a feed has delivered
        self._context, self._watching = contextlib.ExitStack(), contextlib.ExitStack()
        self._watching.enter_context(building(asked=self._asked))  # for good
        atexit.register(self._write)

    def _asked(self, feed: Feed) -> None:
        if self._diagnosis is not None:
            return
        self._most_batches = max(self._most_batches, feed.statistics().batches)
        if self._most_batches >= self._before:
            self._diagnosis = self._context.enter_context(feed.diagnose(self._steps, over=self._end))

    def _end(self) -> None:
        self._write()
        sys.stdout.flush()
        sys.stderr.flush()
        _await_others()
        os._exit(0)

    def _write(self) -> None:
        """The loop takes no more batches."""
        if self._diagnosis is not None:
            self._context.close()
            write(self._folder, self._diagnosis.to_dict())
        else:
            text = f"the longest took {self._most_batches}" if self._most_batches else "none took any"
            (self._folder / NOT_OBSERVED).write_text(text)


def _await_others() -> None:
    """Wait for the other processes of a run: jax ends all of them once process 0 has ended."""
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError as error:  # another process has failed
        print(f"feedline diagnose: {error}", file=sys.stderr, flush=True)
