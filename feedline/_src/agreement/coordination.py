"""A client of jax's coordination service: keys and counters that all processes share.

This is the only module that uses private names of jax. Checked on jaxlib 0.10.2: every call may be made from
several threads at once, and releases the GIL while it waits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from feedline._src.errors import ProcessError

_WAITS_PER_S = 2000  # the most, over all processes: a fifth of the calls/s that process 0 answered on two cores
_counts: collections.Counter[str] = collections.Counter()


def coordination() -> Coordination | None:
    """The service that `jax.distributed.initialize` joined; None before that call, and after the shutdown."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state: Any = distributed.global_state
    return None if state.client is None else Coordination(state.process_id, state.num_processes, state.client)


def counted(kind: str, processes: Sequence[int]) -> str:
    """The path of the keys of these processes' next feed, loop or stop.

    All these processes get the same path if they make their feeds, loops and stops in the same order.

    Example:
      >>> counted("example", [0, 1]), counted("example", [0, 1])
      ('feedline/example/2-29cefc7dda343338/1', 'feedline/example/2-29cefc7dda343338/2')
    """
    path = f"feedline/{kind}/{group_name(processes)}"
    _counts[path] += 1
    return f"{path}/{_counts[path]}"


def group_name(processes: Sequence[int]) -> str:
    """A name for a group of processes: their number and a digest, so that it is short for thousands of them."""
    return f"{len(processes)}-{digest(','.join(map(str, processes)))}"


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def process_names(processes: Sequence[int]) -> str:
    """The processes in words: "process 3", "processes 0 and 1", "processes 0, 1, 2 and 5 more"; "" for none."""
    if len(processes) < 2:
        return f"process {processes[0]}" if processes else ""
    shown, rest = (processes[:-1], str(processes[-1])) if len(processes) <= 4 else (processes[:3], None)
    return f"processes {', '.join(map(str, shown))} and {rest or f'{len(processes) - 3} more'}"


def length_of_waits_s(processes: int, least_s: float) -> float:
    """How long one wait of a process lasts, if the process checks something between two waits. Grows with the
    number of processes, since process 0 answers the calls of all."""
    return max(least_s, processes / _WAITS_PER_S)


@dataclasses.dataclass(frozen=True)
class Coordination:
    """Keys and counters that all processes share. Process 0 stores them; a call takes about 0.3 ms.

    Keys are paths, as in ``feedline/heartbeat/3``, and stay until they are deleted. Every method may be called
    from any thread, and raises a `ProcessError` if process 0 cannot be reached.
    """

    process: int
    processes: int
    _client: Any = dataclasses.field(repr=False)

    def set(self, key: str, value: str) -> bool:
        """Set the key's value if it has none. If it has one, keep that and return False."""
        with contextlib.suppress(_AlreadyThere), _translated(f"set {key}"):
            self._client.key_value_set(key, value)
            return True
        return False

    def replace(self, key: str, value: str) -> None:
        with _translated(f"replace {key}"):
            self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for the key's value and return it. TimeoutError if there is none after `timeout_s`."""
        milliseconds = max(1, math.ceil(timeout_s * 1000))  # a wait of 0 fails even if the key has a value
        with _translated(f"get {key}"):
            value: str = self._client.blocking_key_value_get(key, milliseconds)
            return value

    def try_get(self, key: str) -> str | None:
        with contextlib.suppress(_Missing), _translated(f"get {key}"):
            value: str = self._client.key_value_try_get(key)
            return value
        return None

    def delete(self, key: str) -> None:
        """Delete a key, and all keys below it, if they exist."""
        with _translated(f"delete {key}"):
            self._client.key_value_delete(key)

    def increment(self, key: str) -> int:
        """Add 1 to a counter, which begins at 0, and return the new value. The addition is atomic."""
        with _translated(f"increment {key}"):
            value: int = self._client.key_value_increment(key, 1)
            return value

    def dir(self, path: str) -> dict[str, str]:
        """The full name and the value of every key below a path."""
        with _translated(f"list {path}"):
            return dict(self._client.key_value_dir_get(path))

    def by_process(self, path: str) -> dict[int, str]:
        """The value of each process, from keys ``path/process``; there must be no other keys below the path."""
        return {int(key.rpartition("/")[2]): value for key, value in self.dir(path).items()}


class Comparison:
    """Compares processes' values for a key: the first publishes its value, others compare theirs; nobody waits.

    Args:
      kept: how many of this process's published keys are kept; older keys are deleted, and no longer compared.
    """

    def __init__(self, service: Coordination, kept: int) -> None:
        self._service = service
        self._kept = kept
        self._published: collections.deque[str] = collections.deque()

    def differing(self, key: str, value: Any) -> tuple[int, Any] | None:
        """Return the first process and its JSON value, if that value differs from `value`; otherwise None."""
        text = json.dumps(value)
        if self._service.set(key, f"[{self._service.process}, {text}]"):
            self._published.append(key)
            if len(self._published) > self._kept:
                self._service.delete(self._published.popleft())
        elif found := self._service.try_get(key):
            process, first = json.loads(found)
            if first != json.loads(text):
                return process, first
        return None


def is_unreachable(error: BaseException) -> bool:
    """Whether a call failed because process 0 has ended or is cut off; False after `jax.distributed.shutdown`."""
    return str(error.__cause__).startswith("UNAVAILABLE")


class _AlreadyThere(Exception): ...


class _Missing(Exception): ...


@contextlib.contextmanager
def _translated(action: str) -> Iterator[None]:
    """Translates jax's only exception type into others, by the status with which its message begins."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        status, _, _ = str(error).partition(":")
        if status == "DEADLINE_EXCEEDED":
            raise TimeoutError(f"cannot {action} in time: {str(error).splitlines()[0]}") from error
        if status == "ALREADY_EXISTS":
            raise _AlreadyThere from None
        if status == "NOT_FOUND":
            raise _Missing from None
        raise ProcessError(
            f"the processes communicate through process 0, but this process could not {action}: "
            f"{str(error).splitlines()[0]}; check whether process 0 still runs, and read the end of its log",
            stage="agree",
            process=0,
        ) from error
