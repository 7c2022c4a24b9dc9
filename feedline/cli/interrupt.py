"""Ctrl-C that is never lost."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

T = TypeVar("T")


class Interrupts:
    """Keeps an interrupt that lands in a finalizer, until the loop can act on it.

    Python raises KeyboardInterrupt wherever the main thread stands. In a finalizer or a weakref
    callback it can go nowhere: Python prints it and goes on. A training loop runs such callbacks with
    every batch it lets go of. While this context is entered, one of those is remembered instead.

    Example:
      >>> with Interrupts() as interrupts:
      ...     list(interrupts.watch([1, 2]))
      [1, 2]
    """

    def __init__(self) -> None:
        self._lost = False

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, until there was an interrupt.

        Raises:
          KeyboardInterrupt: one was lost since this context was entered.
        """
        for item in items:
            if self._lost:
                raise KeyboardInterrupt
            yield item

    def __enter__(self) -> Interrupts:
        self._usual_hook = sys.unraisablehook
        sys.unraisablehook = self._hook
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._usual_hook

    def _hook(self, unraisable: UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._lost = True
        else:
            self._usual_hook(unraisable)
