"""A coordination service for thousands of simulated processes, in simulated time.

The processes run the library's own code, and every call is counted. Each call takes the
latency, and time of process 0, which answers one call at a time and sends all answers through one link.

There are no threads: at a call of the service, an exception ends the code of a process. Once the answer is there,
this code runs again from its start, and gets all answers so far. So it must make the same calls each time.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.errors import JaxRuntimeError

from feedline._src.agreement.coordination import Coordination

_SETS = ("set", "replace", "increment")
Work = Callable[[Coordination], None]
"""What a process does."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a call costs.

    Attributes:
      latency_s: from a process to process 0 and back.
      call_s: time of process 0 for each call.
      bytes_per_s: rate of the link of process 0.
    """

    latency_s: float = 5e-4
    call_s: float = 1e-4
    bytes_per_s: float = 1e9


@dataclasses.dataclass
class Traffic:
    """The calls of one process, and the bytes of their keys and values in both directions."""

    calls: int = 0
    carried_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The traffic of each process, and the simulated time at which the last process ended."""

    traffic: list[Traffic]
    seconds: float

    def figures(self, times: int = 1) -> dict[str, float]:
        """Figures for one of `times` repetitions: the mean over processes, the busiest process, and the sum."""
        calls = [each.calls / times for each in self.traffic]
        carried = [each.carried_bytes / times for each in self.traffic]
        return {
            "calls": sum(calls) / len(calls),
            "most_calls": max(calls),
            "all_calls": sum(calls),
            "bytes": sum(carried) / len(carried),
            "most_bytes": max(carried),
            "all_bytes": sum(carried),
            "seconds": self.seconds / times,
        }


def simulate(
    works: Sequence[Work], costs: Costs, *, processes: int | None = None, starts_s: Sequence[float] | None = None
) -> Outcome:
    """Run one process for each of `works` over one service. Raises the error of the first process that failed.

    Args:
      processes: how many there are in all; None: as many as run.
      starts_s: when each starts; None: all at once.

    Example:
      >>> simulate([lambda service: service.increment("came")] * 3, Costs()).figures()["all_calls"]
      3.0
    """
    return _Simulation(costs).run(works, processes or len(works), starts_s)


class _Simulation:
    """The events that are to come, and what process 0 stores."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._values: dict[str, dict[str, str]] = {}  # by the folder of the key
        self._waiting: dict[str, dict[_Process, _Call]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._free_at = 0.0  # when process 0 can answer the next call

    def run(self, works: Sequence[Work], count: int, starts_s: Sequence[float] | None) -> Outcome:
        processes = [_Process(self, number, count, work) for number, work in enumerate(works)]
        for process, start_s in zip(processes, starts_s or [0.0] * len(works), strict=True):
            self.at(start_s, process.resume)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        for process in processes:
            if process.error is not None:
                raise process.error
        return Outcome([process.traffic for process in processes], max(each.ended_s for each in processes))

    def at(self, seconds: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def arrive(self, process: _Process, now: float) -> None:
        """A call arrives at process 0."""
        call = process.call
        if call.name == "wait" and self._find(call.key) is None:
            self._answered_at(now, len(call.key))
            self._waiting.setdefault(call.key, {})[process] = call
            self.at(now + call.timeout_s, functools.partial(self._give_up, process, call))
            return
        self._reply(process, self._apply(call), now)
        if call.name in _SETS:
            for waiting in self._waiting.pop(call.key, {}):
                self._reply(waiting, self._find(call.key), now)

    def _give_up(self, process: _Process, call: _Call, now: float) -> None:
        if self._waiting.get(call.key, {}).get(process) is call:
            del self._waiting[call.key][process]
            self._reply(process, _Refusal("DEADLINE_EXCEEDED: no value in time"), now)

    def _reply(self, process: _Process, answer: Any, now: float) -> None:
        carried = len(process.call.key) + len(process.call.value) + _size(answer)
        process.traffic.calls += 1
        process.traffic.carried_bytes += carried
        process.answers.append(answer)
        self.at(self._answered_at(now, carried) + self.costs.latency_s / 2, process.resume)

    def _answered_at(self, now: float, carried: int) -> float:
        """When process 0 has answered a call of so many bytes, after all earlier calls."""
        took_s = self.costs.call_s + carried / self.costs.bytes_per_s
        self._free_at = max(now, self._free_at) + took_s
        return self._free_at

    def _apply(self, call: _Call) -> Any:
        """Carry out a call that need not wait."""
        folder, _, name = call.key.rpartition("/")
        if call.name == "dir":
            return [
                (f"{at}/{one}", text) for at in self._below(call.key) for one, text in self._values[at].items()
            ]
        if call.name == "delete":
            self._values.get(folder, {}).pop(name, None)
            for at in self._below(call.key):
                del self._values[at]
            return None
        values = self._values.setdefault(folder, {})
        if call.name == "increment":
            values[name] = str(int(values.get(name, "0")) + int(call.value))
            return int(values[name])
        if call.name == "set" and name in values:
            return _Refusal("ALREADY_EXISTS: the key has a value")
        if call.name in _SETS:
            values[name] = call.value
            return None
        return values.get(name, _Refusal("NOT_FOUND: there is no such key"))

    def _below(self, key: str) -> list[str]:
        """The folders at and below a path."""
        top = key.rstrip("/")
        return [at for at in self._values if at == top or at.startswith(f"{top}/")]

    def _find(self, key: str) -> str | None:
        folder, _, name = key.rpartition("/")
        return self._values.get(folder, {}).get(name)


class _Process:
    """The work of one process, and the answers that it was given."""

    def __init__(self, simulation: _Simulation, number: int, count: int, work: Work) -> None:
        self.traffic = Traffic()
        self.error: Exception | None = None
        self.ended_s = 0.0
        self.call: _Call
        self.answers: list[Any] = []
        self._simulation = simulation
        self._service = Coordination(number, count, _Client(self))
        self._work = work
        self._given = 0  # number of answers given in this run of the code

    def resume(self, now: float) -> None:
        """Run until the next call without an answer, or the end."""
        self._given = 0
        try:
            self._work(self._service)
        except _Unanswered:
            arrive = functools.partial(self._simulation.arrive, self)
            self._simulation.at(now + self._simulation.costs.latency_s / 2, arrive)
            return
        except Exception as error:  # noqa: BLE001  # raised once all have ended
            self.error = error
        self.ended_s = now

    def perform(self, call: _Call) -> Any:
        """Make a call."""
        if self._given == len(self.answers):
            self.call = call
            raise _Unanswered
        answer = self.answers[self._given]
        self._given += 1
        if isinstance(answer, _Refusal):
            raise JaxRuntimeError(answer.message)
        return answer


class _Unanswered(BaseException):
    """Ends code at a call that has no answer yet."""


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """The message of an exception, in the place of an answer."""

    message: str


class _Client:
    """Stands in for jax's client of the service, with the methods that `Coordination` calls."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._process.perform(_Call("replace" if allow_overwrite else "set", key, value))

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> Any:
        return self._process.perform(_Call("wait", key, timeout_s=timeout_ms / 1000))

    def key_value_try_get(self, key: str) -> Any:
        return self._process.perform(_Call("get", key))

    def key_value_delete(self, key: str) -> None:
        self._process.perform(_Call("delete", key))

    def key_value_increment(self, key: str, by: int) -> Any:
        return self._process.perform(_Call("increment", key, str(by)))

    def key_value_dir_get(self, prefix: str) -> Any:
        return self._process.perform(_Call("dir", prefix))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call: what it does, the key, and its other arguments."""

    name: str
    key: str
    value: str = ""
    timeout_s: float = 0.0


def _size(answer: Any) -> int:
    """Bytes of the keys and values of an answer."""
    if isinstance(answer, list):
        return sum(len(key) + len(value) for key, value in answer)
    return len(answer) if isinstance(answer, str) else 0
