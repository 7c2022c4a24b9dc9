"""Names a process that does not answer any more, some seconds before jax ends the others because of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable

from feedline._src.agreement.coordination import Coordination, process_names
from feedline._src.errors import FeedError

_ANSWERS = "feedline/answers"
"""Below it, a key of each process, which it replaces again and again."""
_SILENT = "feedline/silent"
"""Its value is the list of the processes whose keys do not change."""
_CALLS_PER_S = 500
"""Of all processes together: with thousands of them, each answers more rarely."""
_LOOKS = 4
"""Looks in a row without a change after which a process is silent. One look may come early: see `Answers`."""


class Answers:
    """Tells when a process has not answered for about `silent_after_s`, and when it answers again.

    With more than some 250 processes it takes longer, and jax may be first.

    Each process replaces a key of its own. Process 0, which stores the keys, looks for those that do not change,
    and publishes the numbers of their processes. The others look whether process 0 answers their calls.

    It only tells, and ends nothing: a thread that holds the GIL for long stops these answers,
    although its process works. jax's heartbeats come from C++; once they stop too, jax ends the others. Looks are
    counted, not seconds, so that a process that was itself stopped does not take the others for silent.

    Args:
      tell: is called with a line for the user, by threads of this class.
      look: is called at each round, by a thread of this class. It may raise a `FeedError`, which is dropped.
    """

    def __init__(
        self, service: Coordination, silent_after_s: float, tell: Callable[[str], None], look: Callable[[], None]
    ) -> None:
        self._service = service
        self._every_s = max(silent_after_s / (_LOOKS + 1), 2 * service.processes / _CALLS_PER_S)
        self._tell = tell
        self._look = look
        self._over = threading.Event()
        self._rounds = 0  # answers of process 0 to this process
        self._silent: list[int] = []  # as told last

    def start(self) -> None:
        """Start the threads."""
        with contextlib.suppress(FeedError):
            self._replace_own()  # at once, so that a process that ends early is judged, too
        threading.Thread(target=self._answer, name="feedline-answers", daemon=True).start()
        if self._service.process:
            threading.Thread(target=self._watch_process_0, name="feedline-process-0", daemon=True).start()

    def stop(self) -> None:
        """Stop the threads, without waiting for them."""
        self._over.set()

    def _answer(self) -> None:
        judge = _Unchanged()
        while not self._over.wait(self._every_s):
            with contextlib.suppress(FeedError):
                self._replace_own()
                if self._service.process:
                    silent: list[int] = json.loads(self._service.try_get(_SILENT) or "[]")
                else:
                    silent = judge.silent(self._service.by_process(_ANSWERS))
                    if silent != self._silent:
                        self._service.replace(_SILENT, json.dumps(silent))
                self._rounds += 1
                self._tell_changes(silent)
                self._look()

    def _replace_own(self) -> None:
        self._service.replace(f"{_ANSWERS}/{self._service.process}", str(self._rounds))

    def _tell_changes(self, silent: list[int]) -> None:
        others = [process for process in silent if process != self._service.process]
        if new := [process for process in others if process not in self._silent]:
            self._tell(self._line(new, "killed, stopped (SIGSTOP), swapped out or cut off from process 0"))
        if back := [process for process in self._silent if process not in others]:
            self._tell(f"{process_names(back)} answered again")
        self._silent = others

    def _watch_process_0(self) -> None:
        before, looks = -1, 0
        while not self._over.wait(self._every_s):
            before, looks, last = self._rounds, (looks + 1 if self._rounds == before else 0), looks
            if looks == _LOOKS:
                self._tell(self._line([0], f"stopped (SIGSTOP), swapped out or cut off from process {self._me}"))
            elif last >= _LOOKS > looks:
                self._tell("process 0 answered again")

    @property
    def _me(self) -> int:
        return self._service.process

    def _line(self, silent: list[int], reasons: str) -> str:
        return (
            f"no answer from {process_names(silent)} for {_LOOKS * self._every_s:.3g} s: {reasons}; look there "
            f"first. Without an answer, jax ends process {self._me} by signal 6 (SIGABRT) when heartbeats time out"
        )


class _Unchanged:
    """Finds the processes whose values are the same at several looks in a row.

    Example:
      >>> unchanged = _Unchanged()
      >>> [unchanged.silent({0: str(i), 1: "7"}) for i in range(6)][-2:]
      [[], [1]]
    """

    def __init__(self) -> None:
        self._values: dict[int, str] = {}
        self._looks: dict[int, int] = {}

    def silent(self, values: dict[int, str]) -> list[int]:
        """Look at the values of all processes."""
        for process, value in values.items():
            same = self._values.get(process) == value
            self._looks[process] = self._looks.get(process, 0) + 1 if same else 0
        self._values = values
        return sorted(process for process in values if self._looks[process] > _LOOKS)
