"""How many messages processes exchange, by the library's own code over a simulated service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from simulated_service import Costs, Outcome, simulate

from claims.scale_plan import sharding_of
from feedline._src.agreement.agree import SharedBuild, group_name
from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import Coordination
from feedline._src.agreement.latest_values import LatestValues
from feedline._src.agreement.replicas import ReplicaCheck
from feedline._src.errors import ProcessError
from feedline._src.loader.streams import Report
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placement

_WINDOWS = 2
_CHECKS = 4
_MOST_ENDS = 1024
"""Processes with lanes that all end: each reads of all, which takes minutes to simulate for more."""
_LATE_S = 10.0
"""How late one process is in the case "late". Below the warning, so that no process logs one."""
_TIMES = {"read_s": 1e-3, "host_s": 1e-3, "place_s": 1e-4, "wait_s": 0.1, "loop_s": 5.0, "readers": 16}
"""As long as what the processes tell of their stages."""


def messages(processes: int, description: Mapping[str, Any], costs: Costs) -> dict[str, dict[str, float]]:
    """{case: figures of its calls, see `Outcome.figures`}.

    Args:
      description: what each process says of the feed that it builds.
    """
    cases: dict[str, Callable[[], tuple[Outcome, int]]] = {
        "build": lambda: (_build(processes, description, costs), 1),
        "build, one 10 s late": lambda: (_build(processes, description, costs, late_s=_LATE_S), 1),
        "build, one differs": lambda: (_build(processes, description, costs, differs=True), 1),
        "window of lanes": lambda: (_lanes(processes, costs, _WINDOWS), _WINDOWS),
        "check of replicas": lambda: (_replicas(processes, costs), _CHECKS),
        "times for the report": lambda: (_times(processes, costs, reads=False), 1),
    }
    if processes <= _MOST_ENDS:
        cases["window of lanes, all end"] = lambda: (_lanes(processes, costs, 1, ends=True), 1)
    return {
        name: outcome.figures(times) for name, (outcome, times) in ((name, run()) for name, run in cases.items())
    }


def _build(
    processes: int,
    description: Mapping[str, Any],
    costs: Costs,
    late_s: float = 0.0,
    differs: bool = False,
) -> Outcome:
    """All processes compare what they build. The last one may be late, or build something else."""
    everyone = range(processes)
    name = f"{group_name(everyone)}/1"

    def work(service: Coordination) -> None:
        build = SharedBuild(service, name, everyone, 30.0, 300.0)
        last = service.process == processes - 1
        if not differs:
            build.agree(description)
            return
        try:
            build.agree({**description, "batch_size": 1} if last else description)
        except ProcessError as error:
            if f"process {processes - 1} has batch_size 1" in str(error):
                return
            raise
        raise RuntimeError("the processes built different feeds, and none of them found out")

    return simulate([work] * processes, costs, starts_s=[0.0] * (processes - 1) + [late_s])


def _lanes(processes: int, costs: Costs, windows: int, ends: bool = False) -> Outcome:
    """Each process has a lane. In each window either none has ended, or all have, each at another place."""

    def work(service: Coordination) -> None:
        gather = AllGather(service, "feedline/agree/0/1", processes, kept=2)
        mine = Report({service.process: 10**6 + service.process} if ends else {})
        for window in range(windows):
            merged = Report.merged(gather(f"0/{window}", mine.to_json(), False, lambda: False))
            if len(merged.ends) != (processes if ends else 0):
                raise RuntimeError(f"a window of {processes} lanes told of {len(merged.ends)} ends")

    return simulate([work] * processes, costs)


def _replicas(processes: int, costs: Costs) -> Outcome:
    """Two processes own the same rows, as every two do, and compare checksums of them."""
    rows = 16 * processes
    values = [np.zeros((32, 8), np.float32)]
    checks = []
    for process in (0, 1):
        sharding = sharding_of(processes, process, replicas=2)
        spec = jax.ShapeDtypeStruct((rows, 8), np.float32, sharding=sharding)
        checks.append((spec, Placement.of(spec).plans))

    def work(service: Coordination) -> None:
        spec, plans = checks[service.process]
        check = ReplicaCheck(
            service, "feedline/agree/0/1", every=1, batch_size=rows, epoch_rows=None, spec=spec, plans=plans
        )
        for batch in range(1, _CHECKS + 1):
            check(values, Cursor(0, batch * rows))

    return simulate([work] * 2, costs, processes=processes)


def _times(processes: int, costs: Costs, reads: bool) -> Outcome:
    """Each process publishes how long its stages take, as it does every few seconds."""

    def work(service: Coordination) -> None:
        latest = LatestValues(service, "feedline/agree/0/1")
        latest.publish(str({"process": service.process, **_TIMES}))
        if reads:
            latest.read()

    return simulate([work] * processes, costs)
