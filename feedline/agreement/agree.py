"""Checks that all processes of a mesh build the same feed; on a difference, all of them raise."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from feedline.agreement.coordination import Coordination, coordination
from feedline.agreement.differences import find_mismatch, process_names
from feedline.agreement.monitor import ended_processes, poll_failure
from feedline.errors import FeedError, ProcessError, as_arguments

_log = logging.getLogger("feedline")
_SLICE_S = 1.0
"""Length of one wait. jax's wait can be interrupted neither by Ctrl-C nor by the failure of another process."""
_built: collections.Counter[str] = collections.Counter()
"""The number of feeds that this process has built, by the processes that build them: the same on all of those."""


@contextlib.contextmanager
def collective_build(processes: Collection[int], warning_s: float, error_s: float) -> Iterator[CollectiveBuild]:
    """Context in which several processes build a feed; they call `agree` on the result, with what they built.

    An exception in the block is also raised by the other processes.

    Args:
      processes: indices of the processes that build the feed. Without this process, or with no other, `agree`
        returns at once.
      warning_s: after this time, a warning names the processes that have not arrived.
      error_s: after this time, `agree` raises.

    Raises:
      ProcessError: from `CollectiveBuild.agree`.
    """
    service = coordination()
    if service is None or service.process not in processes or len(set(processes)) == 1:
        yield CollectiveBuild()
        return
    build = _SharedBuild(service, sorted(set(processes)), warning_s, error_s)
    try:
        yield build
    except BaseException as error:
        verdict = {"stage": "agree", "process": service.process, **as_arguments(error)}
        verdict["message"] = f"process {service.process} could not build it: {verdict['message']}"
        with contextlib.suppress(FeedError):  # process 0 may be gone: this process's own error is what counts
            build.publish(verdict)
        raise


class CollectiveBuild:
    """The build of a feed by a single process, for which there is nothing to compare.

    Attributes:
      key: a path for keys of this feed in the coordination service; None if there is no other process.
    """

    key: str | None = None

    def agree(self, description: Mapping[str, Any]) -> None:
        """Compare this process's description, JSON values by field, with that of every other process.

        Raises:
          ProcessError: a process differs, failed, or did not arrive in time; names the process and the field.
        """


class _SharedBuild(CollectiveBuild):
    """The build of a feed by several processes.

    Each process publishes its description and increments a counter. The last one compares all descriptions and
    publishes the verdict, for which the others wait. This takes four calls a process. The first verdict is
    final, for example the verdict of a process that failed before the last one arrived.
    """

    key: str

    def __init__(self, service: Coordination, processes: list[int], warning_s: float, error_s: float) -> None:
        group = ",".join(map(str, processes))
        _built[group] += 1
        self._service = service
        self._processes = processes
        self._warning_s = warning_s
        self._error_s = error_s
        self.key = f"feedline/agree/{group}/{_built[group]}"

    def agree(self, description: Mapping[str, Any]) -> None:
        """See `CollectiveBuild`."""
        self._service.set(f"{self.key}/said/{self._service.process}", json.dumps(description))
        if self._service.increment(f"{self.key}/came") == len(self._processes):
            descriptions = self._service.dir(f"{self.key}/said")
            found = find_mismatch({_process(key): json.loads(value) for key, value in descriptions.items()})
            self.publish(found and {"message": found.message, "stage": "agree", "process": found.process})
        verdict = self._wait_for_verdict(self._warning_s, self._error_s)
        if verdict is not None:
            rule = "the processes that build a feed together must build the same one"
            raise ProcessError(**{**verdict, "message": f"{rule}: {verdict['message']}"})

    def publish(self, verdict: Mapping[str, Any] | None) -> None:
        """Publish the verdict, if there is none yet: None, or the arguments of the error that all raise."""
        self._service.set(f"{self.key}/verdict", json.dumps(verdict))

    def _wait_for_verdict(self, warning_s: float, error_s: float) -> dict[str, Any] | None:
        began = time.monotonic()
        warned = False
        while (waited_s := time.monotonic() - began) < error_s:
            with contextlib.suppress(TimeoutError):
                verdict: dict[str, Any] | None = json.loads(
                    self._service.get(f"{self.key}/verdict", min(_SLICE_S, error_s - waited_s))
                )
                return verdict
            if (failed := poll_failure()) is not None:
                raise failed
            self._check_ended()
            if not warned and time.monotonic() - began >= warning_s:
                warned = True
                waits_for = process_names(self._absent()) or "the comparison of the feeds of all processes"
                _log.warning("waiting for %s to build this feed, too", waits_for)
        absent = self._absent()
        what = f"{process_names(absent)} did not" if absent else "all arrived, but no process compared the feeds"
        raise ProcessError(
            f"every process of the mesh must build the feed, and its feeds in the same order: {what} within "
            f"{error_s:g} s; read the end of its log, or raise Reading.stall_error_s if the start takes so long",
            stage="agree",
            process=absent[0] if absent else None,
        )

    def _check_ended(self) -> None:
        """Raise if a process that is to build the feed will never come."""
        ended = ended_processes(self._service)
        if gone := [process for process in self._absent() if process in ended]:
            raise ProcessError(
                f"every process of the mesh must build the feed, but {process_names(gone)} reached the end of the "
                "program without it; look there for an early `sys.exit` (call feedline.cluster.abort before it)",
                stage="agree",
                process=gone[0],
            )

    def _absent(self) -> list[int]:
        arrived = {_process(key) for key in self._service.dir(f"{self.key}/said")}
        return [process for process in self._processes if process not in arrived]


def _process(key: str) -> int:
    """The process index with which a key ends."""
    return int(key.rpartition("/")[2])
