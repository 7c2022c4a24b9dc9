"""Checks that all processes of a mesh build the same feed; on a difference, all of them raise."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.agreement.coordination import (
    Coordination,
    coordination,
    counted,
    digest,
    length_of_waits_s,
    process_names,
)
from feedline._src.agreement.monitor import ended_processes, poll_failure
from feedline._src.errors import FeedError, ProcessError, as_arguments

_log = logging.getLogger("feedline")
_SLICE_S = 1.0  # length of one wait in jax, which neither Ctrl-C nor the failure of another process interrupts
_SLICED = (
    "build the feeds in the same order everywhere, and give every process the whole data: feedline finds each "
    "process's rows itself, so a dataset must not be sliced per process (dataset[process::processes], "
    "ShardByJaxProcess), and random maps need a seed"
)
_FIXES = {
    "name": "build the feeds in the same order everywhere",
    "version": "install the same packages everywhere",
    "rows": _SLICED,
    "spec": "build the feeds in the same order everywhere, of data of the same shapes and dtypes",
    "data": _SLICED,
    "sharding": "build the mesh from the same devices in the same order everywhere, as jax.make_mesh does",
}
_FIX = "give every process the same value; the feeds must also be built in the same order everywhere"
_MAX_CHARACTERS = 100
_ABSENT = "absent"


@contextlib.contextmanager
def collective_build(
    processes: Collection[int], warning_s: float, error_s: float, call: str | None = None
) -> Iterator[CollectiveBuild]:
    """Context manager in which several processes build a feed, and at the end compare their feeds by `agree`.

    If the block raises in one process, the other processes raise, too. `agree` returns at once if this process is
    not among `processes`, or is the only one. After `warning_s`, a warning names the processes that have not
    arrived; after `error_s`, an error names them. `call`: see `CollectiveBuild`.
    """
    service, members = coordination(), sorted(set(processes))
    if service is None or service.process not in members or len(members) == 1:
        yield CollectiveBuild(None, None, members, warning_s, error_s, call)
        return
    build = CollectiveBuild(service, counted("feed", members), members, warning_s, error_s, call)
    try:
        yield build
    except BaseException as error:
        build.fail(error)
        raise


@dataclasses.dataclass(frozen=True)
class CollectiveBuild:
    """The build of a feed by several processes. With only one process, nothing is compared, and `key` is None.

    Each process publishes its description under the digest of the description, publishes the digest under its
    process index, and increments a counter. The last process to arrive compares the digests and publishes a
    verdict, for which the others wait. So a process makes four calls. A process that fails publishes a verdict,
    too; the first verdict is final. The last process also deletes the keys of the previous, complete build.
    """

    service: Coordination | None
    key: str | None
    processes: Sequence[int]
    warning_s: float
    error_s: float
    call: str | None = None  # for messages: the method that all call on an existing feed, such as "feed.move"

    @property
    def _path(self) -> str:
        return f"{self.key}/build"

    def agree(self, description: Mapping[str, Any]) -> None:
        """Compare this process's description (JSON values by field) with the descriptions of all other processes.

        If a process differs, failed, or did not arrive in time, a `ProcessError` names it.
        """
        service = self.service
        if service is None:
            return
        text = json.dumps(description)
        service.set(f"{self._path}/description/{digest(text)}", text)
        service.set(f"{self._path}/digest/{service.process}", digest(text))
        if service.increment(f"{self._path}/arrived") == len(self.processes):
            group, _, number = str(self.key).rpartition("/")  # a key of `counted`
            if number != "1":
                service.delete(f"{group}/{int(number) - 1}/build")
            found = self._find_mismatch(service)
            self._publish(
                service, found and {"message": found.message, "stage": "agree", "process": found.process}
            )
        if (verdict := self._verdict(service)) is not None:
            rule = "the processes that build a feed together must build the same one"
            if self.call is not None:
                rule = f"the processes of a feed must call {self.call} after the same batch, with equal arguments"
            raise ProcessError(**{**verdict, "message": f"{rule}: {verdict['message']}"})

    def fail(self, error: BaseException) -> None:
        """Make the other processes raise an error of this process."""
        if (service := self.service) is None:
            return
        verdict = {"stage": "agree", "process": service.process, **as_arguments(error)}
        done = "build it" if self.call is None else f"carry out {self.call}"
        verdict["message"] = f"process {service.process} could not {done}: {verdict['message']}"
        with contextlib.suppress(FeedError):  # process 0 may be gone, but this process must raise its own error
            self._publish(service, verdict)

    def _publish(self, service: Coordination, verdict: Mapping[str, Any] | None) -> None:
        """Publish a verdict: the arguments of an error, or None for no difference. An earlier verdict stays."""
        service.set(f"{self._path}/verdict", json.dumps(verdict))

    def _find_mismatch(self, service: Coordination) -> Mismatch | None:
        digests = service.by_process(f"{self._path}/digest")
        if len(set(digests.values())) == 1:
            return None
        texts = {
            each: service.get(f"{self._path}/description/{each}", self.error_s) for each in {*digests.values()}
        }
        return find_mismatch({process: json.loads(texts[each]) for process, each in digests.items()})

    def _verdict(self, service: Coordination) -> dict[str, Any] | None:
        began, warned = time.monotonic(), False
        slice_s = length_of_waits_s(len(self.processes), _SLICE_S)
        while (waited_s := time.monotonic() - began) < self.error_s:
            with contextlib.suppress(TimeoutError):
                text = service.get(f"{self._path}/verdict", min(slice_s, self.error_s - waited_s))
                verdict: dict[str, Any] | None = json.loads(text)
                return verdict
            if (failed := poll_failure()) is not None:
                raise failed
            ended = ended_processes(service)
            if ended and (gone := [process for process in self._missing(service) if process in ended]):
                raise ProcessError(
                    f"every process of the mesh must build the feed, but {process_names(gone)} reached the end of "
                    "the program without building it; look there for an early `sys.exit` (call "
                    "feedline.cluster.abort before it)",
                    stage="agree",
                    process=gone[0],
                )
            if not warned and time.monotonic() - began >= self.warning_s:
                warned = True
                names = process_names(self._missing(service)) or "the comparison of the feeds of all processes"
                _log.warning("all processes must build (or move) this feed; waiting for %s", names)
        missing = self._missing(service)
        what = f"{process_names(missing)} did not" if missing else "all arrived, but no process compared the feeds"
        raise ProcessError(
            f"all processes of a mesh must build its feeds (and call feed.move) in the same order: {what} "
            f"within {self.error_s:g} s; read the end of its log, or raise Reading.stall_error_s if the "
            "start takes so long",
            stage="agree",
            process=missing[0] if missing else None,
        )

    def _missing(self, service: Coordination) -> list[int]:
        arrived = service.by_process(f"{self._path}/digest")
        return [process for process in self.processes if process not in arrived]


class Mismatch(NamedTuple):
    """A process that differs, and a message with the field, the values and a fix."""

    process: int
    message: str


def find_mismatch(descriptions: Mapping[int, Mapping[str, Any]]) -> Mismatch | None:
    """Find the first field that differs between processes; None if all fields are equal. Pure.

    The most common value is taken to be right; in a tie, the value of the lowest process. Dicts are compared entry
    by entry.
    """
    flat = {process: _flat(description) for process, description in sorted(descriptions.items())}
    fields = list(dict.fromkeys(field for entries in flat.values() for field in entries))
    differing = {field: groups for field in fields if len(groups := _groups(flat, field)) > 1}
    if not differing:
        return None
    field, ((usual, majority), (other, minority), *_) = next(iter(differing.items()))
    message = f"{_having(minority)} {field} {_short(other)}, {_having(majority)} {_short(usual)}"
    if more := list(differing)[1:]:
        shown = ", ".join(more[:3]) + (", …" if len(more) > 3 else "")
        message += f" (and {shown} {'differs' if len(more) == 1 else 'differ'})"
    return Mismatch(minority[0], f"{message}; {_FIXES.get(field.partition('.')[0], _FIX)}")


def _flat(description: Mapping[str, Any]) -> dict[str, str]:
    """Every field as JSON, with dicts flattened: {"order.seed": "0"}."""
    entries = {}
    for field, value in description.items():
        if isinstance(value, Mapping):
            entries.update({f"{field}.{key}": json.dumps(part) for key, part in value.items()})
        else:
            entries[field] = json.dumps(value)
    return entries


def _groups(flat: Mapping[int, Mapping[str, str]], field: str) -> list[tuple[str, list[int]]]:
    """Each value of a field with its processes: most common first; in a tie, the lowest process's value first."""
    groups: dict[str, list[int]] = {}
    for process, entries in flat.items():
        groups.setdefault(entries.get(field, _ABSENT), []).append(process)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _having(processes: list[int]) -> str:
    return f"{process_names(processes)} {'has' if len(processes) == 1 else 'have'}"


def _short(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}…"
