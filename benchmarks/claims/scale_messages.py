"""Counts the messages of processes, by running the library's own code over a simulated service."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from simulated_service import Costs, Outcome, Work, simulate

from claims.scale_plan import sharding_of
from feedline._src.agreement.agree import CollectiveBuild
from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import Coordination
from feedline._src.agreement.in_step import LatestValues
from feedline._src.agreement.replicas import ReplicaCheck
from feedline._src.errors import ProcessError
from feedline._src.loader.streams import Report
from feedline._src.order.schedule import Cursor

_KEY = "feedline/feed/0/1"
_MOST_READERS = 1024
"""The most processes in cases where each reads from all others: more take minutes and gigabytes to simulate."""
_LATE_S = 10.0
_TIMES = {"read_s": 1e-3, "host_s": 1e-3, "place_s": 1e-4, "wait_s": 0.1, "loop_s": 5.0, "readers": 16}
"""As many characters as the times that a process publishes."""


def messages(processes: int, description: Mapping[str, Any], costs: Costs) -> dict[str, dict[str, float]]:
    """{case: figures of its calls, see `Outcome.figures`}. Each process builds a feed of this description."""

    def run(work: Work, late_s: float = 0.0) -> Outcome:
        return simulate([work] * processes, costs, starts_s=[0.0] * (processes - 1) + [late_s])

    def build(service: Coordination, warning_s: float = 30.0) -> None:
        CollectiveBuild(service, _KEY, range(processes), warning_s, 300.0).agree(description)

    def warn(service: Coordination) -> None:
        logging.disable(logging.WARNING)  # each process would write who is late
        try:
            build(service, warning_s=0.0)
        finally:
            logging.disable(logging.NOTSET)

    def differ(service: Coordination) -> None:
        last = service.process == processes - 1
        try:
            own = {**description, "batch_size": 1} if last else description
            CollectiveBuild(service, _KEY, range(processes), 30.0, 300.0).agree(own)
        except ProcessError as error:
            if f"process {processes - 1} has batch_size 1" in str(error):
                return
        raise RuntimeError("the processes built different feeds, and none of them found out")

    def publish(service: Coordination) -> None:
        LatestValues(service, _KEY).publish(str({"process": service.process, **_TIMES}))

    cases = {
        "build": (run(build), 1),
        "build, one 10 s late": (run(build, _LATE_S), 1),
        "build, one differs": (run(differ), 1),
        "window of lanes": (run(lambda service: _windows(service, ends=False)), 2),
        "check of replicas": (_replicas(processes, costs), 4),
        "times for the report": (run(publish), 1),
    }
    if processes <= _MOST_READERS:
        cases["build, all warn of one"] = run(warn, _LATE_S), 1
        cases["window of lanes, all end"] = run(lambda service: _windows(service, ends=True)), 2
    return {name: outcome.figures(times) for name, (outcome, times) in cases.items()}


def _windows(service: Coordination, ends: bool) -> None:
    """Exchange twice which lanes of a stream (one per process) have ended: none, or all, at different rows."""
    gather = AllGather(service, _KEY, service.processes, kept=2)
    own = Report({service.process: 10**6 + service.process} if ends else {}).to_json()
    for window in range(2):
        merged = Report.merged(gather(f"0/{window}", own, False, lambda: False))
        if len(merged.ends) != (service.processes if ends else 0):
            raise RuntimeError(f"a window of {service.processes} lanes told of {len(merged.ends)} ends")


def _replicas(processes: int, costs: Costs) -> Outcome:
    """Processes 2i and 2i + 1 hold the same rows. The first two compare checksums of four batches."""
    rows = 16 * processes
    checks = []
    for process in (0, 1):
        spec = jax.ShapeDtypeStruct((rows, 8), np.float32, sharding=sharding_of(processes, process, replicas=2))
        checks.append(spec)

    def work(service: Coordination) -> None:
        spec = checks[service.process]
        check = ReplicaCheck(service, _KEY, every=1, batch_size=rows, epoch_rows=None, spec=spec)
        for batch in range(1, 5):
            check([np.zeros((32, 8), np.float32)], Cursor(0, batch * rows))

    return simulate([work] * 2, costs, processes=processes)
