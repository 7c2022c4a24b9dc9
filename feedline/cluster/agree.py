"""The processes that build a feed together compare what they build, and all go on or none."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from feedline.cluster.coordination import Coordination, coordination
from feedline.cluster.differences import Difference, difference, named
from feedline.cluster.monitor import failure
from feedline.errors import FeedError, ProcessError

_log = logging.getLogger("feedline")
_SLICE_S = 1.0
"""How long is waited at a time: jax's wait lets no Ctrl-C through, and no failure of another process."""
_built: collections.Counter[str] = collections.Counter()
"""How many feeds this process has built with the same others: they do so in the same order everywhere."""

Agree = Callable[[Mapping[str, Any]], str | None]


@contextlib.contextmanager
def together(processes: Collection[int], warning_s: float, error_s: float) -> Iterator[Agree]:
    """Builds a feed together with other processes: ``with together(...) as agree: ...; agree(description)``.

    `agree` compares this process's description, JSON values by field, with everybody's. Once it is known that
    they are the same it returns a path for keys of this feed alone. An exception before that ends the wait of
    the others: they raise it, too. One process alone agrees with itself and says nothing; its path is None.

    Args:
      processes: indices of those that build it; nobody waits where this one is not among them.
      warning_s: warn, naming them, once others have been waited for so long.
      error_s: give up after so long.

    Raises:
      ProcessError: from `agree`: a process differs, failed, or did not come in time; names it, and the field.
    """
    service = coordination()
    if service is None or service.process not in processes or len(set(processes)) == 1:
        yield lambda description: None
        return
    meeting = _Meeting(service, sorted(set(processes)))
    try:
        yield lambda description: meeting.agree(description, warning_s, error_s)
    except BaseException as error:
        told = f"process {service.process} could not build it: {type(error).__name__}: {error}"
        with contextlib.suppress(FeedError):  # process 0 may be gone: this process's own error is what counts
            meeting.judge(Difference(service.process, told))
        raise


class _Meeting:
    """Everybody publishes a description and counts itself; whoever comes last compares and publishes the verdict.

    So it takes four calls a process, and everybody waits for one key. The first verdict stays: that of a
    process that failed before the last one came, for example.
    """

    def __init__(self, service: Coordination, processes: list[int]) -> None:
        who = ",".join(map(str, processes))
        _built[who] += 1
        self._service = service
        self._processes = processes
        self._key = f"feedline/agree/{who}/{_built[who]}"

    def agree(self, description: Mapping[str, Any], warning_s: float, error_s: float) -> str:
        """See `together`."""
        self._service.set(f"{self._key}/said/{self._service.process}", json.dumps(description))
        if self._service.increment(f"{self._key}/came") == len(self._processes):
            said = self._service.dir(f"{self._key}/said")
            self.judge(difference({_process(key): json.loads(value) for key, value in said.items()}))
        verdict = self._verdict(warning_s, error_s)
        if verdict is not None:
            raise ProcessError(
                f"the processes that build a feed together must build the same one: {verdict.told}",
                stage="agree",
                process=verdict.process,
            )
        return self._key

    def judge(self, verdict: Difference | None) -> None:
        """Publish the verdict, if there is none yet."""
        self._service.set(f"{self._key}/verdict", json.dumps(verdict))

    def _verdict(self, warning_s: float, error_s: float) -> Difference | None:
        began = time.monotonic()
        warned = False
        while (waited_s := time.monotonic() - began) < error_s:
            with contextlib.suppress(TimeoutError):
                found = json.loads(self._service.get(f"{self._key}/verdict", min(_SLICE_S, error_s - waited_s)))
                return None if found is None else Difference(*found)
            if (failed := failure()) is not None:
                raise failed
            if not warned and time.monotonic() - began >= warning_s:
                warned = True
                _log.warning("waiting for %s to build this feed, too", named(self._absent()))
        absent = self._absent()
        raise ProcessError(
            "every process of the mesh must build the feed, and its feeds in the same order: "
            f"{named(absent)} did not within {error_s:g} s. Look what it wrote last; if the start may take so "
            "long, raise Reading.stall_error_s",
            stage="agree",
            process=absent[0] if absent else None,
        )

    def _absent(self) -> list[int]:
        came = {_process(key) for key in self._service.dir(f"{self._key}/said")}
        return [process for process in self._processes if process not in came]


def _process(key: str) -> int:
    """The process at the end of a key."""
    return int(key.rpartition("/")[2])
