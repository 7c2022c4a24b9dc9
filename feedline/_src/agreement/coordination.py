"""A client of jax's coordination service: keys and counters that all processes share.

This is the only module that uses private names of jax. Checked on jaxlib 0.10.2: every call may be made from
several threads at once, and releases the interpreter's lock while it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from feedline._src.errors import ProcessError

_WAITS_PER_S = 2000
"""Waits that all processes together begin in a second: a fifth of the calls that two cores were seen to answer."""


def coordination() -> Coordination | None:
    """The service that `jax.distributed.initialize` joined; None if it was not called."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state: Any = distributed.global_state
    return None if state.client is None else Coordination(state.process_id, state.num_processes, state.client)


def length_of_waits_s(processes: int, least_s: float) -> float:
    """How long a process that waits for a key, and looks up between two waits, makes each of its waits.

    Each wait is a call, and process 0 answers those of all: so waits become longer with the number of processes.

    Example:
      >>> length_of_waits_s(64, 0.5), length_of_waits_s(16_384, 0.5)
      (0.5, 8.192)
    """
    return max(least_s, processes / _WAITS_PER_S)


def backends_are_initialized() -> bool:
    """Whether jax has already set up its devices, so that it is too late to join."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@dataclasses.dataclass(frozen=True)
class Coordination:
    """Keys and counters that all processes share. Process 0 stores them; a call takes about 0.3 ms.

    Keys are paths, as in ``feedline/abort/heard/3``. They stay until they are deleted. Every method may be
    called from any thread, and raises a `ProcessError` if process 0 cannot be reached.

    Attributes:
      process: index of this process.
      processes: the number of processes.
    """

    process: int
    processes: int
    _client: Any = dataclasses.field(repr=False)

    def set(self, key: str, value: str) -> bool:
        """Set the key's value if it has none. False if it had one already, which stays."""
        with contextlib.suppress(_AlreadyThere), _translated(f"set {key}"):
            self._client.key_value_set(key, value)
            return True
        return False

    def replace(self, key: str, value: str) -> None:
        """Set the key's value, whether it has one or not."""
        with _translated(f"replace {key}"):
            self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for the key's value and return it. TimeoutError if there is none after `timeout_s`."""
        with _translated(f"get {key}"):
            value: str = self._client.blocking_key_value_get(key, _milliseconds(timeout_s))
            return value

    def try_get(self, key: str) -> str | None:
        """The key's value, or None if there is none now."""
        with contextlib.suppress(_Missing), _translated(f"get {key}"):
            value: str = self._client.key_value_try_get(key)
            return value
        return None

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        with _translated(f"delete {key}"):
            self._client.key_value_delete(key)

    def increment(self, key: str, by: int = 1) -> int:
        """Add to a counter, which begins at 0, and return the new value. The addition is atomic."""
        with _translated(f"increment {key}"):
            value: int = self._client.key_value_increment(key, by)
            return value

    def dir(self, prefix: str) -> dict[str, str]:
        """The full name and the value of every key below a path."""
        with _translated(f"list {prefix}"):
            return dict(self._client.key_value_dir_get(prefix))

    def by_process(self, path: str) -> dict[int, str]:
        """The value of each process, from keys ``path/process``; there must be no other keys below the path."""
        return {int(key.rpartition("/")[2]): value for key, value in self.dir(path).items()}


def process_names(processes: Sequence[int]) -> str:
    """The processes in words: "process 3", "processes 0 and 1", "processes 0, 1, 2 and 5 more"; "" for none."""
    if len(processes) < 2:
        return f"process {processes[0]}" if processes else ""
    shown, rest = (processes[:-1], str(processes[-1])) if len(processes) <= 4 else (processes[:3], None)
    return f"processes {', '.join(map(str, shown))} and {rest or f'{len(processes) - 3} more'}"


def is_unreachable(error: BaseException) -> bool:
    """Whether a call failed because process 0 has ended or is cut off; False after `jax.distributed.shutdown`."""
    return str(error.__cause__).startswith("UNAVAILABLE")


class _AlreadyThere(Exception):
    """The key has a value."""


class _Missing(Exception):
    """The key has no value."""


@contextlib.contextmanager
def _translated(action: str) -> Iterator[None]:
    """Translates jax's only exception type by the status with which its message begins."""
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
            f"the processes communicate through process 0, but this one could not {action}: "
            f"{str(error).splitlines()[0]}; check whether process 0 still runs, and read the end of its log",
            stage="agree",
            process=0,
        ) from error


def _milliseconds(timeout_s: float) -> int:
    """The time in milliseconds, at least 1: a wait of 0 fails even if the key has a value."""
    return max(1, math.ceil(timeout_s * 1000))
