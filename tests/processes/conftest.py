"""The fixture that starts each topology once, and returns what its cases returned."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import pytest

from .cases import CASES, Case, Here, name_of
from .launch import ALONE, TOPOLOGIES, Topology, launch, result_of
from .values import combined, with_shards


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcome(topology, case, *chosen)`: what a case returned there, combined from all processes.

    The topologies run one after the other, `ALONE` last.
    """

    @functools.cache
    def launched(topology: Topology) -> Path:
        index = TOPOLOGIES.index(topology)
        before = launched(TOPOLOGIES[index - 1]) if index else None
        folder = tmp_path_factory.mktemp(str(topology))
        modules = sorted({function.args[0].__module__ for function in CASES.values()})
        launch(topology, modules, folder, before)
        return folder

    @functools.cache
    def outcome(topology: Topology, case: Case, *chosen: str) -> Any:
        name = name_of(case, *chosen)
        if topology == ALONE:
            before = lambda: result_of(launched(TOPOLOGIES[-1]), name, 0)  # noqa: E731
            return combined(
                [with_shards(case(Here(jax.devices(), tmp_path_factory.mktemp(name), before), *chosen))]
            )
        folder = launched(topology)
        return combined([result_of(folder, name, process) for process in range(topology.processes)])

    return outcome
