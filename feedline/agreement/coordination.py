"""What the processes tell each other: keys, counters and barriers of jax's coordination service.

The one file that knows private names of jax. Checked on jaxlib 0.10.2: every call may be made from
several threads at once, and lets the other threads of its process run while it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from feedline.errors import ProcessError


def coordination() -> Coordination | None:
    """The service that `jax.distributed.initialize` joined; None where it was not called."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state: Any = distributed.global_state
    return None if state.client is None else Coordination(state.process_id, state.num_processes, state.client)


def backends_are_initialized() -> bool:
    """Whether jax has already set up its devices, so that it is too late to join."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@dataclasses.dataclass(frozen=True)
class Coordination:
    """Keys, counters and barriers that all processes share. Process 0 holds them; a call takes some 0.3 ms.

    Keys are paths, as in ``feedline/agree/0,1/3/verdict``. What is not deleted stays. From any thread.

    Attributes:
      process: index of this process.
      processes: how many there are.

    Every method raises a `ProcessError` if process 0 cannot be reached.
    """

    process: int
    processes: int
    _client: Any = dataclasses.field(repr=False)

    def set(self, key: str, value: str) -> bool:
        """Publish a value. The first one stays: False if the key had one already."""
        with contextlib.suppress(_AlreadyThere), _told(f"set {key}"):
            self._client.key_value_set(key, value)
            return True
        return False

    def get(self, key: str, timeout_s: float) -> str:
        """The key's value, waiting for it. TimeoutError if there was none for so long."""
        with _told(f"get {key}"):
            value: str = self._client.blocking_key_value_get(key, _milliseconds(timeout_s))
            return value

    def try_get(self, key: str) -> str | None:
        """The key's value, or None if there is none now."""
        with contextlib.suppress(_Missing), _told(f"get {key}"):
            value: str = self._client.key_value_try_get(key)
            return value
        return None

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        with _told(f"delete {key}"):
            self._client.key_value_delete(key)

    def increment(self, key: str, by: int = 1) -> int:
        """Add to a counter, which begins at 0. The new value: no two callers see the same."""
        with _told(f"increment {key}"):
            value: int = self._client.key_value_increment(key, by)
            return value

    def dir(self, prefix: str) -> dict[str, str]:
        """Every key below a path, whole, and its value."""
        with _told(f"list {prefix}"):
            return dict(self._client.key_value_dir_get(prefix))

    def barrier(self, name: str, timeout_s: float, processes: Sequence[int] | None = None) -> None:
        """Wait until `processes` (None: all) are here. TimeoutError if one of them did not come in time.

        A name may be used again after it let everybody pass. After a timeout the others that come to it
        fail at once.
        """
        with _told(f"meet at {name}"):
            self._client.wait_at_barrier(name, _milliseconds(timeout_s), processes)


class _AlreadyThere(Exception):
    """The key has a value."""


class _Missing(Exception):
    """The key has no value."""


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns jax's one exception into what it means: its message begins with the status."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        status, _, _ = str(error).partition(":")
        if status == "DEADLINE_EXCEEDED":
            raise TimeoutError(f"cannot {what} in time: {str(error).splitlines()[0]}") from error
        if status == "ALREADY_EXISTS":
            raise _AlreadyThere from None
        if status == "NOT_FOUND":
            raise _Missing from None
        raise ProcessError(
            f"the processes talk through process 0, but this one could not {what}: "
            f"{str(error).splitlines()[0]}; look whether process 0 still runs, and what it wrote last",
            stage="agree",
            process=0,
        ) from error


def _milliseconds(timeout_s: float) -> int:
    """At least one: a wait of zero fails even where the value is there."""
    return max(1, math.ceil(timeout_s * 1000))
