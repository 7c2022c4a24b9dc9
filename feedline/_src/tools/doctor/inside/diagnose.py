"""Diagnoses the first feed that a loop takes batches from, in each process of a command."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from feedline._src.building import building

if TYPE_CHECKING:
    from feedline._src.feed import Feed


def start(folder: str) -> None:
    """Diagnose a feed of this process.

    Args:
      folder: where the diagnosis is written. Its "given.txt" has the batches to take before, and those of the
        diagnosis, as "8 200".
    """
    before, steps = (int(number) for number in Path(folder, "given.txt").read_text().split())
    loop = _Loop(Path(folder), before, steps)
    atexit.register(loop.left)
    loop.watching.enter_context(building(asked=loop.asked))  # for good


class _Loop:
    """Waits for a feed that delivered `before` batches, diagnoses it, and ends the process.

    The process ends at once, as by `os._exit`: the model was trained on repeated batches, and must not be saved.
    """

    def __init__(self, folder: Path, before: int, steps: int) -> None:
        self._folder, self._before, self._steps = folder, before, steps
        self._counts: weakref.WeakKeyDictionary[Feed, int] = weakref.WeakKeyDictionary()
        self._feed: Feed | None = None
        self._context: contextlib.ExitStack | None = None
        self.watching = contextlib.ExitStack()

    def asked(self, feed: Feed) -> None:
        """A batch of this feed is asked for."""
        if self._feed is not None:
            return
        count = self._counts[feed] = self._counts.get(feed, 0) + 1
        if count > self._before:
            self._feed, self._context = feed, contextlib.ExitStack()
            self._diagnosis = self._context.enter_context(feed.diagnose(self._steps, over=self._over))

    def _over(self) -> None:
        """All phases are over."""
        self.left()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def left(self) -> None:
        """The loop takes no more batches."""
        context, self._context = self._context, None
        if context is not None:
            context.close()
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self._diagnosis.to_dict()))
