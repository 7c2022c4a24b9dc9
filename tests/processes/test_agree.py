"""Processes with different feeds raise at the start, and each error names a process and a field that differ."""

import time

import jax
import numpy as np
import pytest

import feedline
from feedline._src import build

from .cases import case
from .launch import TOPOLOGIES
from .layouts import sharding_of
from .sources import ROWS, N
from .values import PerProcess

pytestmark = pytest.mark.slow

SIZE, FOUR = 16, TOPOLOGIES[1]
ODD = 1
"""The process that differs."""
SAME = {"source": ROWS, "batch_size": SIZE, "epochs": 1}


def narrow(batch, rows):
    return {"x": batch["x"].astype(np.float16)}


def wide(batch, rows):
    return {"x": batch["x"].astype(np.float32)}


def given(field, here, odd):
    """The arguments of a feed. In the odd process, `field` differs."""
    sharding = sharding_of("permuted" if field == "sharding" and odd else "data", here.devices)
    changed = {
        "name": {"name": "eval"},
        "rows": {"source": {name: leaf[:-1] for name, leaf in ROWS.items()}},
        "spec": {"source": {**ROWS, "y": ROWS["y"].astype(np.int16)}},
        "data": {"source": {**ROWS, "y": ROWS["y"] + 1}},
        "order.seed": {"order": feedline.Order(seed=7)},
        "order.shuffle": {"order": feedline.Order(shuffle=False)},
        "batch_size": {"batch_size": 2 * SIZE},
        "epochs": {"epochs": 2},
        "remainder": {"remainder": "wrap"},
        "leaf": {"transform": narrow},
    }
    common = {"transform": wide} if field == "leaf" else {"name": "train"} if field == "name" else {}
    return SAME | common | {"sharding": sharding} | (changed.get(field, {}) if odd else {})


FIELDS = {
    "name": 'process 1 has name "eval", ',
    "rows": f"process 1 has rows {N - 1}, ",
    "spec": """process 1 has spec.batch['y'] ["int16", []], """,
    "data": "process 1 has data ",
    "order.seed": "process 1 has order.seed 7, ",
    "order.shuffle": "process 1 has order.shuffle false, ",
    "batch_size": f"process 1 has batch_size {2 * SIZE}, ",
    "epochs": "process 1 has epochs 2, ",
    "remainder": 'process 1 has remainder "wrap", ',
    "leaf": """process 1 has leaf.batch['x'] "float16[16, 8]", """,
    "sharding": "process 1 has sharding.batch['x'] \"P('data',) on devices ",
    "version": 'process 1 has version.grain "0.0", ',
}


def refused(**arguments):
    """The message of the error that a feed raises, the process that it names, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises(feedline.ProcessError) as raised:
        feedline.Feed(**arguments)
    return str(raised.value), raised.value.process, PerProcess(time.monotonic() - began)


@case(FIELDS, on=lambda field: [FOUR])
def differs(here, field):
    odd = jax.process_index() == ODD
    with pytest.MonkeyPatch.context() as patch:
        if field == "version" and odd:
            patch.setattr(build, "version", lambda package: "0.0" if package == "grain" else "1")
        if field == "version" and not odd:
            patch.setattr(build, "version", lambda package: "1")
        return refused(**given(field, here, odd))


@pytest.mark.parametrize("field", FIELDS)
def test_every_process_names_the_one_that_differs_and_the_field(outcome, field, measured):
    told, process, waited_s = outcome(FOUR, differs, field)
    assert "must build the same one: " + FIELDS[field] in told
    assert "processes 0, 2 and 3 have" in told
    assert process == ODD
    assert max(waited_s) < 60
    measured("it has other data, another seed, other versions", max(waited_s))


class Unreadable:
    """Rows that cannot be read, on one process."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if jax.process_index() == ODD:
            raise OSError("the disk is gone")
        return {"x": np.float32(i)}


@case(on=lambda: [FOUR])
def cannot_read_on_one(here):
    began = time.monotonic()
    with pytest.raises(feedline.FeedError) as raised:
        feedline.Feed(Unreadable(), SIZE, sharding_of("data", here.devices))
    return PerProcess((str(raised.value), raised.value.where, time.monotonic() - began))


def test_a_process_that_cannot_build_its_feed_ends_the_wait_of_the_others(outcome):
    """The error in the others names stage, process and row once."""
    found = outcome(FOUR, cannot_read_on_one)
    for told, where, waited_s in found[:ODD] + found[ODD + 1 :]:
        assert where == {"stage": "read", "process": ODD, "row": 0}
        assert "process 1 could not build it: RowError: the dataset failed on this row with OSError: the d" in told
        assert told.count("stage read") == told.count("row 0") == 1
        assert told.endswith("[stage read, process 1, row 0]")
        assert waited_s < 60


@case()
def built_together(here):
    """Feeds on all devices and, in between, on those of some processes."""
    half = here.devices[: len(here.devices) // 2]
    is_in_half = any(device in jax.local_devices() for device in half)
    for devices in (here.devices, half, here.devices[::-1]):
        if devices is not half or is_in_half:
            feedline.Feed(**SAME, sharding=sharding_of("data", devices)).close()
    with feedline.Feed(**SAME, sharding=sharding_of("data", here.devices)) as feed:
        return [batch["y"] for batch in feed]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_feeds_on_all_and_on_some_processes_do_not_interfere(outcome, topology):
    assert len(outcome(topology, built_together)) == N // SIZE
