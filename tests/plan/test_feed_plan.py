"""The plan of a feed, against the indices that JAX gives for each device, against feeds, and by hand."""

import math
import os
import re
import sys
import threading

import grain
import jax
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from row_sources import Numbered

import feedline
from feedline import FeedOptions, Order, Reading
from feedline._src.plan.plan import Epoch

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
DATA = NamedSharding(MESH, P("data"))
ROWS = {"image": np.zeros((100, 6, 6), np.uint8), "label": np.arange(100), "x": np.ones((100, 4))}
"""A row is placed as 36 + 4 + 16 bytes; label and x are read as 8 + 32 bytes before they are cast."""


def plan_of(source, batch_size, sharding=DATA, processes=1, process=None, **options):
    return FeedOptions(source, batch_size, sharding, **options).plan(processes, process)


# --- who reads what ---

SHAPES = {"x": (16, 4, 8), "y": (16,), "z": (16, 8)}
AXES = ("data", "model", "other")
MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2)]


@st.composite
def layouts(draw):
    """A mesh of eight devices in any order, and a spec for each leaf."""
    shape = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()))
    mesh = Mesh(np.array(devices).reshape(shape), AXES[: len(shape)])
    shardings = {}
    for name, sizes in SHAPES.items():
        axes = draw(st.permutations(mesh.axis_names))
        entries, left = [], list(axes)
        for size in sizes:
            taken = [left.pop() for _ in range(draw(st.integers(0, len(left))))]
            fits = size % math.prod(mesh.shape[axis] for axis in taken) == 0
            entries.append(tuple(taken) if taken and fits else None)
        shardings[name] = NamedSharding(mesh, P(*entries))
    return shardings


@settings(max_examples=150)
@given(layouts(), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_process_reads_what_its_devices_hold(shardings, processes, is_there):
    rows, planned = {name: np.zeros((32, *shape[1:]), np.int16) for name, shape in SHAPES.items()}, shardings
    if not is_there:  # devices of an abstract mesh are numbered in the order of its axes
        shape, names = (mesh := next(iter(shardings.values())).mesh).devices.shape, mesh.axis_names
        there, absent = Mesh(np.array(jax.devices()).reshape(shape), names), AbstractMesh(shape, names)
        planned = {name: NamedSharding(absent, sharding.spec) for name, sharding in shardings.items()}
        shardings = {name: NamedSharding(there, sharding.spec) for name, sharding in shardings.items()}
    plan = plan_of(rows, 16, planned, processes)
    assert [reads.process for reads in plan.reads] == list(range(processes))
    for reads in plan.reads:
        own = range(reads.process * 8 // processes, (reads.process + 1) * 8 // processes)
        assert list(reads.devices) == list(own)
        read_rows, bytes_read = np.zeros(16, bool), 0
        for name, sizes in SHAPES.items():
            held = np.zeros(sizes, bool)
            for device, index in shardings[name].devices_indices_map(sizes).items():
                if device.id in own:
                    held[index] = True
            # the smallest rectangle around what the devices hold
            sides = [np.flatnonzero(held.any(axis=tuple(set(range(held.ndim)) - {i}))) for i in range(held.ndim)]
            leaf = reads.leaves[f"batch['{name}']"]
            columns = [np.arange(size)[column] for column, size in zip(leaf.columns, sizes[1:], strict=True)]
            for side, expected in zip([leaf.rows, *columns], sides, strict=True):
                np.testing.assert_array_equal(side, expected)
            read_rows[sides[0]] = True
            bytes_read += 2 * math.prod(len(side) for side in sides)
        assert reads.rows.dtype == np.int64
        assert reads.rows.tolist() == np.flatnonzero(read_rows).tolist()
        assert (reads.local_bytes, reads.read_bytes, reads.cuts) == (bytes_read, 0, False)


def test_one_process_is_that_of_all():
    whole, one = plan_of(ROWS, 16, processes=4), plan_of(ROWS, 16, processes=4, process=2)
    (reads,) = one.reads
    assert (reads.process, reads.devices) == (2, (4, 5))
    np.testing.assert_array_equal(reads.rows, whole.reads[2].rows)
    assert (one.memory, one.processes) == (whole.memory, 4)
    np.testing.assert_array_equal(plan_of(ROWS, 16, processes=None).reads[0].rows, feedline.local_rows(DATA, 16))


@pytest.mark.parametrize(
    ("processes", "process", "told"),
    [
        (3, None, "divide the 8 devices of the mesh into equal parts, got 3; 2 or 4 would work"),
        (0, None, "processes must be at least 1, got 0"),
        (4, 4, "process 4 owns no device of .* Build the mesh from"),
    ],
)
def test_processes_must_divide_the_devices_and_each_has_some(processes, process, told):
    with pytest.raises(ValueError, match=told):
        plan_of(ROWS, 16, processes=processes, process=process)


class Whole:
    """Rows that can only be read whole."""

    def __len__(self):
        return 32

    def __getitem__(self, row):
        return {"z": np.zeros(8, np.int16), "y": np.float64(row)}


def test_whole_rows_are_read_where_a_source_cannot_read_columns():
    """z: int16[8] of which a process places 4; y: float64, placed as float32. Each process reads all 16 rows."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    plan = plan_of(Whole(), 16, {"z": NamedSharding(mesh, P(None, "data")), "y": NamedSharding(mesh, P())}, 2)
    for reads in plan.reads:
        assert (reads.rows.tolist(), reads.cuts, reads.by_leaf) == (list(range(16)), True, False)
        assert reads.local_bytes == 16 * (4 * 2 + 4)
        assert reads.read_bytes == 16 * (8 * 2 + 8)


# --- memory, by hand ---


def test_memory_by_hand():
    """32 rows on 4 shards, in 2 processes of 2 shards each: 16 rows a process, 8 a device."""
    plan = plan_of(ROWS, 32, processes=2)
    assert [reads.local_bytes for reads in plan.reads] == [16 * 56] * 2
    assert [reads.read_bytes for reads in plan.reads] == [16 * 40] * 2
    assert plan.memory == (3 * 16 * 56, 7 * 16 * 56, 3 * 16 * 40, 0, 4 * 8 * 56)


def test_memory_with_other_buffers_workers_and_several_steps_a_call():
    plan = plan_of(ROWS, 32, reading=Reading(buffer=5), prefetch=3, steps_per_call=10)
    assert plan.memory == (6 * 320 * 56, 11 * 320 * 56, 6 * 320 * 40, 0, 5 * 80 * 56)
    plan = plan_of({"x": np.ones((96, 4), np.float32)}, 32, reading=Reading(workers=2))
    assert plan.memory.shared_bytes == 2 * (2 * 1 + 3) * 32 * 16


def test_auto_is_planned_with_the_numbers_to_begin_with():
    auto = {"reading": Reading(threads="auto", workers="auto", buffer="auto"), "prefetch": "auto"}
    assert plan_of(ROWS, 32, **auto).memory == plan_of(ROWS, 32).memory


@pytest.mark.parametrize("transform", [None, lambda batch, rows: {"x": batch["x"][:, :2]}])
def test_a_host_batch_is_as_large_as_the_buffers_of_a_feed(transform):
    (reads,) = plan_of(ROWS, 32, transform=transform).reads
    with feedline.Feed(ROWS, 32, DATA, transform=transform) as feed:
        form = feed._stages.access.buffers.staging._form
    assert reads.local_bytes + reads.read_bytes == sum(math.prod(shape) * dtype.itemsize for shape, dtype in form)


# --- sizes ---


@pytest.mark.parametrize("rows", [16, 31, 100])
def test_an_epoch_of_a_feed(rows):
    source, epoch = {"x": np.arange(rows)}, Epoch.of(rows, 16)
    with feedline.Feed(source, 16, DATA, epochs=1) as feed:
        assert feed.steps_per_epoch == epoch.steps == sum(1 for _ in feed)
        assert feed.statistics().dropped_rows == epoch.left_out
    with feedline.Feed(source, 16, DATA, epochs=1, remainder="pad") as feed:
        padding = [int((~np.asarray(batch["valid"])).sum()) for batch in feed]
        assert (len(padding), sum(padding)) == (epoch.padded_steps, epoch.padding)


# --- beside a feed ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remainder": "pad", "with_place": True},
        {"remainder": "wrap", "epochs": 3},
        {"epochs": 2, "steps_per_call": 4, "transform": lambda batch, rows: {"y": batch["x"] > 0}},
        {"epochs": 1, "reading": Reading(bad_rows="mask")},
    ],
)
def test_spec_and_length_are_those_of_a_feed(options):
    plan = plan_of(ROWS, 24, **options)
    assert plan.problems == ()
    with feedline.Feed(ROWS, 24, DATA, **options) as feed:
        assert plan.spec == feed.spec
        assert plan.length == (len(feed) if feed.options.epochs else None)
        if options.get("remainder") != "wrap":
            steps = plan.epoch.padded_steps if options.get("remainder") == "pad" else plan.epoch.steps
            assert steps == feed.steps_per_epoch


def test_no_row_is_read_and_no_thread_starts():
    class Unread(Numbered):
        def read(self, rows, out):
            raise AssertionError("a row was read")

    before = set(threading.enumerate())
    source = Unread(100, x=np.zeros(3, np.float32))  # its `close` raises an error, too
    plan = plan_of(source, 16, transform=lambda batch, rows: {"y": batch["x"].astype(np.int8)})
    assert plan.spec["y"].dtype == np.int8
    assert set(threading.enumerate()) <= before  # those of other tests may end


PROGRAM = """
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import feedline
sharding = NamedSharding(AbstractMesh((4096, 4), ("data", "model")), PartitionSpec("data", "model"))
options = feedline.FeedOptions({"x": np.zeros((10_000, 8))}, 8192, sharding, remainder="pad")
plan = options.plan(processes=2048, process=2047)
print(plan.reads[0].rows.tolist(), plan.reads[0].devices, plan.memory.device_bytes)
"""


def test_a_plan_needs_no_device():
    """jax has no platform "none", so a look at any device would fail."""
    environ = os.environ | {"JAX_PLATFORMS": "none"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = programs.run(command, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == f"[8188, 8189, 8190, 8191] {tuple(range(16376, 16384))} {4 * 2 * (2 * 4 + 1)}\n"


@pytest.mark.parametrize(
    "use",
    [
        lambda sharding: feedline.Feed(ROWS, 8, sharding),
        lambda sharding: feedline.prefetch_to_mesh([], {"x": sharding}),
        lambda sharding: feedline.local_rows(sharding, 8),
    ],
)
def test_a_mesh_without_devices_is_refused(use):
    with pytest.raises(ValueError, match=r"is abstract; build it over a jax.sharding.Mesh, or let .*FeedOptions"):
        use(NamedSharding(AbstractMesh((8,), ("data",)), P("data")))


# --- problems ---


def refusal(*args, **options):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is returned
        feedline.Feed(*args, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("size", "told", "fitting"),
    [
        (30, "must be a multiple of the 4 shards of the batch axis, got 30; 28 or 32 would work", 28),
        (3, "got 3; 4 would work", 4),
    ],
)
def test_a_size_that_does_not_fit_is_planned_with_one_that_does(size, told, fitting):
    plan = plan_of(ROWS, size)
    (problem,) = plan.problems
    assert told in problem
    assert (plan.batch_size, plan.fitting_size, plan.multiple_of, plan.length) == (size, fitting, 4, None)
    assert plan.spec["x"].shape == (fitting, 4)
    assert "must be a multiple of the 4 shards" in refusal(ROWS, size, DATA)


EPOCHS = st.sampled_from([None, 1, 2])


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from(["drop", "pad", "wrap"]), EPOCHS)
def test_problems_are_found_where_a_feed_finds_them(rows, size, divided, remainder, epochs):
    """And sizes that the plan suggests are accepted."""
    source, sharding = {"x": np.zeros(rows, np.float32)}, DATA if divided else NamedSharding(MESH, P())

    def builds(size):
        try:
            feedline.Feed(source, size, sharding, remainder=remainder, epochs=epochs).close()
        except ValueError:
            return False
        return True

    plan = plan_of(source, size, sharding, remainder=remainder, epochs=epochs)
    assert (plan.problems == ()) == builds(size)
    for problem in plan.problems:
        if "at most" in problem:
            assert builds(int(re.search("at most ([0-9]+)", problem)[1]))
    for other in plan.next_sizes():
        assert plan_of(source, other, sharding, remainder="pad").problems == ()


def make_lane(lane, count):
    return grain.MapDataset.range(lane, 100, count).map(lambda i: {"x": np.int32(i)}).to_iter_dataset()


LANES = feedline.Lanes(make_lane, 2)
RAGGED = feedline.Ragged({"x": (np.zeros(300), np.arange(0, 303, 3))}, pad_to=(4,))
MIXTURE = feedline.Mixture({"a": ROWS, "b": ROWS}, weights={"a": 1, "b": 2})
SIZES = [(0, 16), (3, 32)]
SPLIT = NamedSharding(MESH, P(None, "data"))
GSPMD = GSPMDSharding(DATA._device_assignment, DATA._to_xla_hlo_sharding(1))


@pytest.mark.parametrize(
    ("source", "size", "options", "told"),
    [
        (LANES, 16, {"order": Order()}, "a stream has no other order than its own"),
        (LANES, 16, {"reading": Reading(workers=1)}, "a stream brings its own workers"),
        (LANES, 16, {"steps_per_call": 2}, "a stream has no random access"),
        (LANES, 16, {"remainder": "wrap"}, "needs one lane"),
        (LANES, SIZES, {}, "got a stream; leave that out"),
        (ROWS, SIZES, {"steps_per_call": 2}, "got steps_per_call=2; leave that out"),
        (ROWS, SIZES, {"prefetch": "auto"}, 'got "auto" for prefetch; leave that out'),
        (ROWS, 16, {"steps_per_call": 4, "epochs": 1}, "6 are left from epoch 0"),
        (ROWS, 16, {"steps_per_call": 2, "reading": Reading(workers=1)}, "needs threads that read"),
        (ROWS, 16, {"reading": Reading(workers=1)}, "this one holds arrays in memory"),
        (RAGGED, 16, {"steps_per_call": 2}, "stacks batches of one shape"),
        (RAGGED, 16, {"transform": lambda batch, rows: batch["x_length"]}, "a transform must return one shape"),
        (RAGGED, 16, {"sharding": {"x": SPLIT, "x_length": DATA}}, "must not split axis 1 of a ragged leaf"),
        (np.zeros(96), 16, {"steps_per_call": 2, "sharding": GSPMD}, "which only a NamedSharding can describe"),
        ({"x": np.zeros(96)}, 16, {"with_place": True, "sharding": GSPMD}, "to shard the batch axis alone"),
        (MIXTURE, 16, {"order": Order()}, "a mixture has an order of its own"),
        (MIXTURE, 16, {"epochs": 1}, "an endless mixture has no epochs to count"),
        (grain.MapDataset.range(5).repeat(), 4, {"order": Order()}, "which no Order can shuffle"),
        (np.zeros((8, 3)), 8, {"remainder": "pad"}, "one array without a name"),
        ((np.zeros(8), np.zeros(8)), 8, {"remainder": "pad"}, "it is a tuple"),
        ({"valid": np.zeros(8)}, 8, {"reading": Reading(bad_rows="mask")}, "it has the keys ['valid']"),
    ],
)
def test_options_that_do_not_go_together_are_refused_as_by_a_feed(source, size, options, told):
    problem = plan_of(source, size, **options).problems[0]
    assert told in problem
    assert problem == refusal(source, size, **{"sharding": DATA, **options})


def test_all_sizes_must_fit():
    problems = plan_of(ROWS, [(0, 16), (3, 30), (5, 102)]).problems
    assert [re.search("got ([0-9]+);|one of ([0-9]+);", problem)[0] for problem in problems] == [
        "got 30;",
        "got 102;",
        "one of 102;",
    ]
    plan = plan_of(ROWS, SIZES)
    assert (plan.problems, plan.batch_size, plan.spec["x"].shape, plan.length) == ((), 16, (16, 4), None)


# --- other sources ---


@pytest.mark.parametrize(
    ("lanes", "processes", "owners", "window"),
    [
        (1, 1, [(0,)], 1),
        (1, 2, [(0,), (0,)], 1),  # each process reads the whole stream, so that none waits for another
        (6, 2, [(0, 1, 2), (3, 4, 5)], 2),
        (3, 2, [(0, 1), (1, 2)], 2),
    ],
)
def test_lanes(lanes, processes, owners, window):
    plan = plan_of(feedline.Lanes(make_lane, lanes), 12, processes=processes)
    assert [reads.lanes for reads in plan.reads] == owners
    assert (plan.rows, plan.lanes, plan.epoch, plan.length) == (None, lanes, None, None)
    assert plan.settings.buffer == window
    assert plan.memory.host_bytes == (window + 1) * 12 * 4 // processes
    assert plan_of(feedline.Lanes(make_lane, lanes), 12, processes=processes, process=0).settings == plan.settings


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.permutations(range(8)))
def test_the_owners_of_a_lane_supply_a_row_of_it(count, order):
    """Expected owners come from looking at every row. Each process has two devices, anywhere on the mesh."""
    mesh = Mesh(np.array(jax.devices())[list(order)], ("data",))
    lanes = feedline.Lanes(make_lane, count)
    plan = plan_of(lanes, 24, NamedSharding(mesh, P("data")), processes=4)
    expected = [set() for _ in range(count)]
    for row in range(24):
        expected[row // (24 // count)].add(order[row // 3] // 2)
    assert plan.lane_owners == tuple(tuple(sorted(processes)) for processes in expected)
    assert plan.agrees_on_ends == any(len(processes) < 4 for processes in expected)


def test_processes_with_other_lanes_need_one_prefetch():
    for processes, count in ((1, 0), (2, 1)):
        problems = plan_of(LANES, 16, processes=processes, prefetch="auto").problems
        assert [text for text in problems if 'cannot be "auto"' in text] == list(problems)
        assert len(problems) == count


def test_what_has_no_end_has_no_epoch():
    endless = grain.MapDataset.range(5).map(lambda i: {"x": np.int32(i)}).repeat()
    for source in (endless, MIXTURE):
        plan = plan_of(source, 64)
        assert (plan.rows, plan.epoch, plan.length, plan.problems) == (None, None, None, ())
        feedline.Feed(source, 64, DATA).close()


def test_ragged_rows_are_planned_at_their_longest():
    plan = plan_of(RAGGED, 16)
    with feedline.Feed(RAGGED, 16, DATA) as feed:
        assert plan.spec == feed.spec
