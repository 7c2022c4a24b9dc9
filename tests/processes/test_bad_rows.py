"""Bad rows and their substitutes are the same on any number of processes."""

import itertools
import json

import grain
import jax
import numpy as np
import pytest

import feedline
from feedline._src.order.epoch import rows_at, substitutes_at

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of
from .sources import ORDER, ROWS, N
from .values import PerProcess

pytestmark = pytest.mark.slow

SIZE, EPOCHS = 16, 2
BAD = [4, 20, 21]
LAYOUTS = ["data", "model_across", "sequence", "columns"]
FIRST = 1  # the substitute in a stream, its first item


def _rows():
    """Each bad row has one number that does not fit; with sharded columns only some processes read it."""
    x = ROWS["x"].astype(np.int64)
    x[BAD, [0, 3, 7]] = 2**40
    return {**ROWS, "x": x}


def _record(i):
    if i in BAD:
        raise OSError("damaged")
    return {name: leaf[i] for name, leaf in ROWS.items()}


def _item(i):
    return {name: leaf[i] for name, leaf in _rows().items()}


SOURCES = {
    "columns": lambda: {"source": _rows(), "order": ORDER},
    "records": lambda: {"source": grain.MapDataset.range(N).map(_record), "order": ORDER},
    "stream": lambda: {"source": grain.MapDataset.range(N)[FIRST:].map(_item).to_iter_dataset()},
}


@case(SOURCES, LAYOUTS, ["substitute", "mask"])
def a_pass(here, source, layout, policy):
    reading = feedline.Reading(bad_rows=policy, bad_rows_budget=99, quarantine=here.folder / "bad.jsonl")
    with feedline.Feed(
        **SOURCES[source](),
        batch_size=SIZE,
        sharding=sharding_of(layout, here.devices),
        epochs=EPOCHS,
        remainder="wrap",
        reading=reading,
    ) as feed:
        batches = list(feed)
        return {
            "batches": batches,
            "counted": PerProcess(feed.statistics().bad_rows),
            "listed": PerProcess(
                [json.loads(line)["row"] for line in (here.folder / "bad.jsonl").read_text().splitlines()]
            ),
        }


def _wanted(source):
    """(row, bad) at each position of the order."""
    if source == "stream":
        return [(FIRST if i in BAD else i, i in BAD) for _ in range(EPOCHS) for i in range(FIRST, N)]
    run = [(e, p, int(rows_at(ORDER, N, e, np.array([p]))[0])) for e in range(EPOCHS) for p in range(N)]
    substitutes = [
        [row for row in substitutes_at(ORDER.seed, N, e, p).tolist() if row not in BAD] for e, p, _ in run
    ]
    return [
        (substitute[0] if row in BAD else row, row in BAD)
        for (_, _, row), substitute in zip(run, substitutes, strict=True)
    ]


@pytest.mark.parametrize("policy", ["substitute", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_substitutes_of_bad_rows_do_not_depend_on_processes(outcome, source, layout, policy):
    run = _wanted(source)
    wanted = [run[i : i + SIZE] for i in range(0, len(run) - SIZE + 1, SIZE)]
    met = sum(bad for _, bad in itertools.chain(*wanted))
    for topology in (ALONE, *TOPOLOGIES):
        found = outcome(topology, a_pass, source, layout, policy)
        assert len(found["batches"]) == len(wanted)
        for batch, told in zip(found["batches"], wanted, strict=True):
            rows, bad = (np.array(values) for values in zip(*told, strict=True))
            for name, leaf in ROWS.items():
                np.testing.assert_array_equal(batch[name], leaf[rows], f"{name} on {topology}")
            valid = batch.get("valid", np.ones(SIZE, bool))
            np.testing.assert_array_equal(valid, ~bad | (policy == "substitute"), f"valid on {topology}")
        if source == "stream":  # its items may differ between epochs
            assert found["counted"] == [len(rows) for rows in found["listed"]]
        else:
            assert all(len(rows) == len(set(rows)) for rows in found["listed"])
            assert {row for rows in found["listed"] for row in rows} == set(BAD)
        assert max(found["counted"]) <= met <= sum(found["counted"])
        if layout == "data":
            assert sum(found["counted"]) == met


@case(["sequence", "columns"])
def raised(here, layout):
    """The place of the error, or None. With sharded columns, only processes that read the wrong number raise."""
    with feedline.Feed(_rows(), SIZE, sharding_of(layout, here.devices), order=ORDER, prefetch=0) as feed:
        try:
            for _ in range(3):
                jax.block_until_ready(next(feed))
        except feedline.RowError as error:
            return PerProcess((error.row, error.epoch, error.position))
    return PerProcess(None)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("layout", ["sequence", "columns"])
def test_the_error_names_row_and_position_where_leaves_are_sharded_by_columns(outcome, topology, layout):
    places = [place for place in outcome(topology, raised, layout) if place is not None]
    assert places
    for row, epoch, position in places:
        assert row in BAD
        assert rows_at(ORDER, N, epoch, np.array([position])) == [row]
