"""The processes that build a feed together compare what they build, and all go on or none."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from feedline.agreement.coordination import Coordination, coordination
from feedline.agreement.differences import difference, named
from feedline.agreement.monitor import failure_meanwhile
from feedline.errors import FeedError, ProcessError, as_arguments

_log = logging.getLogger("feedline")
_SLICE_S = 1.0
"""How long is waited at a time: jax's wait lets no Ctrl-C through, and no failure of another process."""
_built: collections.Counter[str] = collections.Counter()
"""How many feeds this process has built with the same others: they do so in the same order everywhere."""


@contextlib.contextmanager
def together(processes: Collection[int], warning_s: float, error_s: float) -> Iterator[Meeting]:
    """Builds a feed together with other processes: ``with together(...) as meeting: ...; meeting.agree(...)``.

    An exception in the block ends the wait of the others: they raise it, too.

    Args:
      processes: indices of those that build it; nobody waits where this one is not among them.
      warning_s: warn, naming them, once others have been waited for so long.
      error_s: give up after so long.

    Raises:
      ProcessError: from `Meeting.agree`.
    """
    service = coordination()
    if service is None or service.process not in processes or len(set(processes)) == 1:
        yield Meeting()
        return
    meeting = _Meeting(service, sorted(set(processes)), warning_s, error_s)
    try:
        yield meeting
    except BaseException as error:
        verdict = {"stage": "agree", "process": service.process, **as_arguments(error)}
        verdict["message"] = f"process {service.process} could not build it: {verdict['message']}"
        with contextlib.suppress(FeedError):  # process 0 may be gone: this process's own error is what counts
            meeting.judge(verdict)
        raise


class Meeting:
    """Of one process alone, which agrees with itself.

    Attributes:
      key: a path for keys of this feed alone; None if nobody else is there.
    """

    key: str | None = None

    def agree(self, description: Mapping[str, Any]) -> None:
        """Compare this process's description, JSON values by field, with everybody's.

        Raises:
          ProcessError: a process differs, failed, or did not come in time; names it, and the field.
        """


class _Meeting(Meeting):
    """Everybody publishes a description and counts itself; whoever comes last compares and publishes the verdict.

    So it takes four calls a process, and everybody waits for one key. The first verdict stays: that of a
    process that failed before the last one came, for example.
    """

    key: str

    def __init__(self, service: Coordination, processes: list[int], warning_s: float, error_s: float) -> None:
        who = ",".join(map(str, processes))
        _built[who] += 1
        self._service = service
        self._processes = processes
        self._warning_s = warning_s
        self._error_s = error_s
        self.key = f"feedline/agree/{who}/{_built[who]}"

    def agree(self, description: Mapping[str, Any]) -> None:
        """See `Meeting`."""
        self._service.set(f"{self.key}/said/{self._service.process}", json.dumps(description))
        if self._service.increment(f"{self.key}/came") == len(self._processes):
            said = self._service.dir(f"{self.key}/said")
            found = difference({_process(key): json.loads(value) for key, value in said.items()})
            self.judge(found and {"message": found.told, "stage": "agree", "process": found.process})
        verdict = self._verdict(self._warning_s, self._error_s)
        if verdict is not None:
            rule = "the processes that build a feed together must build the same one"
            raise ProcessError(**{**verdict, "message": f"{rule}: {verdict['message']}"})

    def judge(self, verdict: Mapping[str, Any] | None) -> None:
        """Publish the verdict, if there is none yet: None, or the arguments of the error that all raise."""
        self._service.set(f"{self.key}/verdict", json.dumps(verdict))

    def _verdict(self, warning_s: float, error_s: float) -> dict[str, Any] | None:
        began = time.monotonic()
        warned = False
        while (waited_s := time.monotonic() - began) < error_s:
            with contextlib.suppress(TimeoutError):
                verdict: dict[str, Any] | None = json.loads(
                    self._service.get(f"{self.key}/verdict", min(_SLICE_S, error_s - waited_s))
                )
                return verdict
            if (failed := failure_meanwhile()) is not None:
                raise failed
            if not warned and time.monotonic() - began >= warning_s:
                warned = True
                waits_for = named(self._absent()) or "the comparison of all processes, which have come"
                _log.warning("waiting for %s to build this feed, too", waits_for)
        absent = self._absent()
        what = f"{named(absent)} did not" if absent else "all came, but nobody compared what they built"
        raise ProcessError(
            f"every process of the mesh must build the feed, and its feeds in the same order: {what} within "
            f"{error_s:g} s. Look what it wrote last; if the start may take so long, raise Reading.stall_error_s",
            stage="agree",
            process=absent[0] if absent else None,
        )

    def _absent(self) -> list[int]:
        came = {_process(key) for key in self._service.dir(f"{self.key}/said")}
        return [process for process in self._processes if process not in came]


def _process(key: str) -> int:
    """The process at the end of a key."""
    return int(key.rpartition("/")[2])
