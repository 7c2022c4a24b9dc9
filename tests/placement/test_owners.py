"""Which processes read which lanes, compared with every row that each device holds."""

import logging
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from feedline._src.placement.owners import owners_of, read_everywhere, warn_of_shared_lanes


class Device(NamedTuple):
    process_index: int
    number: int


def leaf_of(size, processes):
    """A vector of which each device holds an equal part; `processes` gives the process of each device."""
    part = size // len(processes)
    held = {Device(p, i): (slice(i * part, (i + 1) * part),) for i, p in enumerate(processes)}
    mesh = SimpleNamespace(shape={"data": len(processes)})
    sharding = SimpleNamespace(devices_indices_map=lambda shape: held, spec=PartitionSpec("data"), mesh=mesh)
    return SimpleNamespace(shape=(size,), sharding=sharding)


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    st.lists(st.sampled_from([1, 2, 4, 8]).flatmap(lambda n: st.lists(st.integers(0, 3), min_size=n, max_size=n)),
             min_size=1, max_size=2),
)  # fmt: skip
def test_owners_supply_a_row_of_the_lane(count, leaves):
    size = 24
    expected = [set() for _ in range(count)]
    for processes in leaves:
        for row in range(size):
            expected[row // (size // count)].add(processes[row // (size // len(processes))])
    owners = owners_of([leaf_of(size, processes) for processes in leaves], count)
    assert owners == tuple(tuple(sorted(processes)) for processes in expected)
    everybody = {process for processes in leaves for process in processes}
    assert read_everywhere(owners) == all(processes == everybody for processes in expected)


@pytest.mark.parametrize(
    ("count", "processes", "warns"),
    [
        (2, [0, 1, 2, 3], "2 of 2 lanes run on several processes: .* has 4 shards, .* a multiple of 4 lanes"),
        (3, [0, 1], "1 of 3 lanes run on several processes: .* has 2 shards, .* a multiple of 2 lanes"),
        (4, [0, 1, 2, 3], None),
        (2, [0, 0, 1, 1], None),  # fewer lanes than shards, but each process has its own
        (8, [0, 1], None),
    ],
)
def test_a_warning_names_the_number_of_lanes_that_fits(caplog, count, processes, warns):
    leaves = [leaf_of(24, processes)]
    with caplog.at_level(logging.WARNING, "feedline"):
        warn_of_shared_lanes(owners_of(leaves, count), leaves)
    assert len(caplog.messages) == (warns is not None)
    assert all(re.search(warns, message) for message in caplog.messages)
