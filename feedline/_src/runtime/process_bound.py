"""A base class for iterators that can be neither copied nor used in a forked process."""

from __future__ import annotations

import os
from typing import ClassVar, NoReturn


class ProcessBound:
    """Refuses to pickle or copy an iterator that holds threads and open files, and to use it in a forked process.

    Attributes:
      _name: the name of the iterator in error messages.
      _instead: what to do instead of copying it, for error messages.
    """

    _name: ClassVar[str]
    _instead: ClassVar[str]

    def __init__(self) -> None:
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} can be neither pickled nor copied, since it holds threads and open files; "
            f"{self._instead}"
        )

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_not_forked(self) -> None:
        if self._is_forked():
            raise ValueError(
                f"{self._name} works in the process that built it, {self._process}, and this is {os.getpid()}, a "
                "fork of it: threads, JAX's too, do not survive a fork. Start the process by "
                f'multiprocessing.get_context("spawn"), and there {self._instead}'
            )
