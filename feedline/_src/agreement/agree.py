"""Checks that all processes of a mesh build the same feed; on a difference, all of them raise."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from feedline._src.agreement.coordination import Coordination, coordination, length_of_waits_s, process_names
from feedline._src.agreement.differences import Mismatch, find_mismatch
from feedline._src.agreement.monitor import ended_processes, poll_failure
from feedline._src.errors import FeedError, ProcessError, as_arguments

_log = logging.getLogger("feedline")
_BUILDS = "feedline/build"
_SLICE_S = 1.0
"""Length of one wait, or more if there are thousands of processes.

jax's wait can be interrupted neither by Ctrl-C nor by the failure of another process.
"""


class _Group:
    """The feeds that this process builds together with the same others.

    Attributes:
      built: their number: the same in the whole group.
      left: names of the builds that this process has left and whose keys are still stored.
      lock: held while one of them is built. So a process that comes to a build has left the one before, or builds
        the feed inside it: that thread may take the lock again.
    """

    def __init__(self) -> None:
        self.built = 0
        self.left: list[str] = []
        self.lock = threading.RLock()


_groups: dict[str, _Group] = {}


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
    members = sorted(set(processes))
    group = _groups.setdefault(group_name(members), _Group())
    with group.lock:
        group.built += 1
        name = f"{group_name(members)}/{group.built}"
        older = tuple(group.left)
        build = SharedBuild(service, name, members, warning_s, error_s, older)
        try:
            yield build
        except BaseException as error:
            verdict = {"stage": "agree", "process": service.process, **as_arguments(error)}
            verdict["message"] = f"process {service.process} could not build it: {verdict['message']}"
            with contextlib.suppress(FeedError):  # process 0 may be gone: this process's own error is what counts
                build.publish(verdict)
            raise
        else:
            group.left = [each for each in group.left if each not in older]
        finally:
            group.left.append(name)


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


class SharedBuild(CollectiveBuild):
    """The build of a feed by several processes.

    Each process publishes its description, under a digest of it, publishes that digest under its index, and
    increments a counter. The last one compares, and publishes the verdict, for which the others wait. This takes
    four calls a process, and none grows with the number of processes but one: the last process reads all digests.
    The first verdict is final, for example the verdict of a process that failed before the last one arrived.

    Args:
      name: a path, the same in every process, and another one for each build.
      processes: the processes that build it, ascending.
      older: names of builds which every process has left before it comes to this one. The last one to come deletes
        their keys.
    """

    key: str

    def __init__(
        self,
        service: Coordination,
        name: str,
        processes: Sequence[int],
        warning_s: float,
        error_s: float,
        older: Sequence[str] = (),
    ) -> None:
        self.key = f"feedline/agree/{name}"
        self._keys = f"{_BUILDS}/{name}"  # of the build alone: the feed may stay open for long
        self._older = older
        self._service = service
        self._processes = processes
        self._warning_s = warning_s
        self._error_s = error_s

    def agree(self, description: Mapping[str, Any]) -> None:
        """See `CollectiveBuild`."""
        text = json.dumps(description)
        digest = _digest(text)
        self._service.set(f"{self._keys}/text/{digest}", text)
        self._service.set(f"{self._keys}/said/{self._service.process}", digest)
        if self._service.increment(f"{self._keys}/came") == len(self._processes):
            found = self._find_mismatch()
            for name in self._older:
                self._service.delete(f"{_BUILDS}/{name}")
            self.publish(found and {"message": found.message, "stage": "agree", "process": found.process})
        verdict = self._wait_for_verdict(self._warning_s, self._error_s)
        if verdict is not None:
            rule = "the processes that build a feed together must build the same one"
            raise ProcessError(**{**verdict, "message": f"{rule}: {verdict['message']}"})

    def publish(self, verdict: Mapping[str, Any] | None) -> None:
        """Publish the verdict, if there is none yet: None, or the arguments of the error that all raise."""
        self._service.set(f"{self._keys}/verdict", json.dumps(verdict))

    def _find_mismatch(self) -> Mismatch | None:
        digests = self._service.by_process(f"{self._keys}/said")
        if len(set(digests.values())) == 1:
            return None
        texts = {}
        for digest in set(digests.values()):
            texts[digest] = self._service.get(f"{self._keys}/text/{digest}", self._error_s)
        return find_mismatch({process: json.loads(texts[digest]) for process, digest in digests.items()})

    def _wait_for_verdict(self, warning_s: float, error_s: float) -> dict[str, Any] | None:
        began, warned = time.monotonic(), False
        slice_s = length_of_waits_s(len(self._processes), _SLICE_S)
        while (waited_s := time.monotonic() - began) < error_s:
            with contextlib.suppress(TimeoutError):
                verdict: dict[str, Any] | None = json.loads(
                    self._service.get(f"{self._keys}/verdict", min(slice_s, error_s - waited_s))
                )
                return verdict
            if (failed := poll_failure()) is not None:
                raise failed
            self._check_ended()
            if not warned and time.monotonic() - began >= warning_s:
                warned = True
                names, _ = self._absent()
                waits_for = names or "the comparison of the feeds of all processes"
                _log.warning("waiting for %s to build (or to move) this feed, too", waits_for)
        names, first = self._absent()
        what = f"{names} did not" if names else "all arrived, but no process compared the feeds"
        raise ProcessError(
            f"every process of the mesh must build the feed, and its feeds in the same order (feed.move counts): "
            f"{what} within {error_s:g} s; read the end of its log, or raise Reading.stall_error_s if the start "
            "takes so long",
            stage="agree",
            process=first,
        )

    def _check_ended(self) -> None:
        """Raise if a process that is to build the feed will never come."""
        if not (ended := ended_processes(self._service)):
            return
        arrived = self._service.by_process(f"{self._keys}/said")
        if gone := [process for process in self._processes if process in ended and process not in arrived]:
            raise ProcessError(
                f"every process of the mesh must build the feed, but {process_names(gone)} reached the end of the "
                "program without it; look there for an early `sys.exit` (call feedline.cluster.abort before it)",
                stage="agree",
                process=gone[0],
            )

    def _absent(self) -> tuple[str, int | None]:
        """The processes that have not arrived, in words, and the first of them.

        The first process that asks after an arrival reads who has arrived, and publishes what it found: all ask at
        the same time, and thousands of lists with thousands of entries would keep process 0 busy for minutes.
        """
        arrivals = self._service.increment(f"{self._keys}/came", by=0)
        key = f"{self._keys}/absent/{arrivals}"
        if self._service.increment(f"{key}/asked") > 1:
            with contextlib.suppress(TimeoutError):  # that process may have been killed
                names, first = json.loads(self._service.get(f"{key}/found", _SLICE_S))
                return names, first
        arrived = self._service.by_process(f"{self._keys}/said")
        absent = [process for process in self._processes if process not in arrived]
        found = process_names(absent), absent[0] if absent else None
        self._service.set(f"{key}/found", json.dumps(found))
        return found


def group_name(processes: Sequence[int]) -> str:
    """A name for a group of processes that is as short for thousands of them: how many they are, and a digest.

    Example:
      >>> group_name([0, 1])
      '2-29cefc7dda343338'
    """
    return f"{len(processes)}-{_digest(','.join(map(str, processes)))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
