"""The description as a whole: memory by hand, what a feed itself says, and why a feed refuses."""

import math
import re

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.feed_options import FeedOptions
from feedline._src.options import Reading
from feedline._src.tools.inspect.contents import contents_of, shown
from feedline._src.tools.inspect.description import default_batch_size, describe, sharding_of
from feedline._src.tools.inspect.resolve import Overrides, resolve
from feedline._src.tools.inspect.sizes import next_sizes

EPOCHS = st.sampled_from([None, 1, 2])
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
DATA = NamedSharding(MESH, P("data"))
ROWS = {"image": np.zeros((100, 6, 6), np.uint8), "label": np.arange(100), "x": np.ones((100, 4))}
"""A row is placed as 36 + 4 + 16 bytes; label and x are read as 8 + 32 bytes before they are cast."""


def described(source, batch_size, sharding=DATA, processes=1, transform=None, **options):
    options = {"remainder": "drop", "prefetch": 2, "reading": Reading(), "epochs": None, **options}
    request = FeedOptions(source, batch_size, sharding, transform=transform, **options)
    return describe(contents_of(source, transform), request, MESH, processes)


# --- memory ---


def test_memory_by_hand():
    """32 rows on 4 shards, in 2 processes of 2 shards each: 16 rows a process, 8 a device."""
    found = described(ROWS, 32, processes=2)
    assert [each.local_bytes for each in found.reads] == [16 * 56] * 2
    assert [each.read_bytes for each in found.reads] == [16 * 40] * 2
    assert found.memory == (3 * 16 * 56, 7 * 16 * 56, 3 * 16 * 40, 4 * 8 * 56)


def test_memory_with_other_buffers_and_several_steps_a_call():
    reading = Reading(buffer=5)
    found = described(ROWS, 32, reading=reading, prefetch=3, steps_per_call=10)
    assert found.memory == (6 * 320 * 56, 11 * 320 * 56, 6 * 320 * 40, 5 * 80 * 56)


def test_memory_with_the_leaf_that_pad_adds():
    """One byte a row."""
    found = described(ROWS, 32, remainder="pad")
    assert found.names[-1] == "batch['valid']"
    assert found.memory == (3 * 32 * 57, 7 * 32 * 57, 3 * 32 * 40, 4 * 8 * 57)


def test_memory_with_a_transform_counts_what_is_read_beside_what_it_returns():
    found = described({"x": ROWS["image"]}, 32, transform=lambda batch, rows: {"x": batch["x"].astype(np.float32)})
    assert found.memory == (3 * 32 * 144, 7 * 32 * 144, 3 * 32 * 36, 4 * 8 * 144)


@pytest.mark.parametrize("transform", [None, lambda batch, rows: {"x": batch["x"][:, :2]}])
def test_a_host_batch_is_as_large_as_the_buffers_of_a_feed(transform):
    found = described(ROWS, 32, transform=transform)
    (reads,) = found.reads
    with feedline.Feed(ROWS, 32, DATA, transform=transform) as feed:
        form = feed._stages.access.buffers.staging._form
    assert reads.local_bytes + reads.read_bytes == sum(math.prod(shape) * dtype.itemsize for shape, dtype in form)


# --- beside a feed ---


@pytest.mark.parametrize("remainder", ["drop", "pad", "wrap"])
def test_the_batch_is_the_spec_of_a_feed(remainder):
    found = described(ROWS, 24, remainder=remainder)
    with feedline.Feed(ROWS, 24, DATA, remainder=remainder) as feed:
        spec = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(feed.spec)}
    assert {name.removeprefix("batch"): leaf for name, leaf in zip(found.names, found.batch, strict=True)} == spec
    assert found.problems == []


# --- problems ---


def refusal(*args, **options):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is returned
        feedline.Feed(*args, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("size", "told", "drawn"),
    [
        (30, "must be a multiple of the 4 shards of the batch axis, got 30; 28 or 32 would work.", 28),
        (3, "got 3; 4 would work.", 4),
    ],
)
def test_a_size_that_does_not_fit_is_described_with_one_that_does(size, told, drawn):
    found = described(ROWS, size)
    (problem,) = found.problems
    assert told in problem
    assert (found.described_size, found.multiple) == (drawn, 4)
    assert "must be a multiple of the 4 shards" in refusal(ROWS, size, DATA)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from(["drop", "pad", "wrap"]), EPOCHS)
def test_problems_are_found_where_a_feed_finds_them(rows, size, divided, remainder, epochs):
    """And the first sizes that each of them names are accepted."""
    source, sharding = {"x": np.zeros(rows, np.float32)}, DATA if divided else NamedSharding(MESH, P())

    def builds(size):
        try:
            feedline.Feed(source, size, sharding, remainder=remainder, epochs=epochs).close()
        except ValueError:
            return False
        return True

    found = described(source, size, sharding, remainder=remainder, epochs=epochs)
    assert (found.problems == []) == builds(size)
    for problem in found.problems:
        if "at most" in problem:
            assert builds(int(re.search("at most ([0-9]+)", problem)[1]))
    for other in next_sizes(size, found.multiple):
        assert described(source, other, sharding, remainder="pad").problems == []


def test_a_size_that_fits_neither_mesh_nor_data():
    found = described(ROWS, 102)
    assert len(found.problems) == 2
    assert "100 or 104 would work" in found.problems[0]
    assert "100 rows cannot fill one of 102; use a batch size of at most 100, or" in found.problems[1]


def test_too_few_rows():
    one = {"x": np.zeros((1, 3), np.float32)}
    (problem,) = described(one, 4).problems
    assert "1 row cannot fill one of 4; use fewer shards of the batch axis, or remainder" in problem
    assert described(one, 4, remainder="pad").problems == []
    assert described(one, 4, remainder="wrap").problems == []
    assert len(described(one, 4, remainder="wrap", epochs=3).problems) == 1
    assert described(one, 4, remainder="wrap", epochs=4).problems == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (np.zeros((8, 3)), "it is one array without a name"),
        ((np.zeros(8), np.zeros(8)), "it is a tuple"),
        ({"valid": np.zeros(8)}, "it has the keys ['valid']"),
    ],
)
def test_pad_needs_names(source, told):
    (problem,) = described(source, 8, remainder="pad").problems
    assert told in problem
    assert "must be a plain dict of strings" in refusal(source, 8, DATA, remainder="pad")


@pytest.mark.parametrize("spec", [P("data", "model"), P("data", None, "model")])
def test_leaves_that_no_batch_size_fits_are_an_error(spec):
    with pytest.raises(ValueError, match=r"names|must be a multiple of the 2 shards"):
        described(
            {"x": np.zeros((8, 3, 5))} if len(spec) > 2 else {"x": np.zeros(8)}, 8, NamedSharding(MESH, spec)
        )


# --- streams ---


def make_lane(lane, count):
    return grain.MapDataset.range(lane, 100, count).map(lambda i: {"x": np.int32(i)}).to_iter_dataset()


@pytest.mark.parametrize(
    ("lanes", "processes", "owners", "ahead"),
    [
        (1, 1, [[0]], 1),
        (1, 2, [[0], [0]], 1),  # each process reads the whole stream, so that none waits for another
        (6, 2, [[0, 1, 2], [3, 4, 5]], 2),
        (3, 2, [[0, 1], [1, 2]], 2),
    ],
)
def test_lanes(lanes, processes, owners, ahead):
    source = feedline.Lanes(make_lane, lanes)
    found = described(source, 12, processes=processes)
    assert [found.lanes_of(each) for each in found.reads] == owners
    assert (found.ahead, found.contents.rows, found.contents.lanes) == (ahead, None, lanes)
    assert found.memory.host_bytes == (ahead + 1) * 12 * 4 // processes


def test_a_batch_of_lanes_is_a_multiple_of_shards_and_lanes():
    (problem,) = described(feedline.Lanes(make_lane, 6), 16).problems
    assert "the 4 shards of the batch axis and of the 6 lanes, so of 12, got 16; 12 or 24 would work" in problem


def test_a_dataset_that_repeats_without_end_has_no_epochs():
    found = described(grain.MapDataset.range(5).map(lambda i: {"x": np.int32(i)}).repeat(), 64)
    assert (found.contents.rows, found.problems) == (None, [])


# --- what is asked ---


def test_a_spec_is_cut_for_leaves_with_fewer_axes():
    contents = contents_of(ROWS)
    sharding = sharding_of(contents, MESH, ("data", "model"))
    specs = {"image": P("data", "model"), "label": P("data"), "x": P("data", "model")}
    assert {name: each.spec for name, each in sharding.items()} == specs
    with feedline.Feed(ROWS, 8, sharding) as feed:
        assert feed.spec["label"].shape == (8,)


@pytest.mark.parametrize(("rows", "size"), [(100, 32), (20, 20), (5, 4), (1, 4)])
def test_the_default_batch_size(rows, size):
    assert default_batch_size(contents_of(np.zeros(rows)), DATA) == size


def test_arguments_from_the_command_line_replace_those_of_a_feed(tmp_path, monkeypatch):
    (tmp_path / "feeds_to_inspect.py").write_text(
        """
import numpy as np
import feedline
from jax.sharding import NamedSharding, PartitionSpec

def make_feed(mesh):
    spare = feedline.Feed({"y": np.zeros(50)}, 8, NamedSharding(mesh, PartitionSpec()))
    spare.close()
    return feedline.Feed({"x": np.zeros(100)}, 16, NamedSharding(mesh, PartitionSpec("data")), prefetch=7)
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    usual = feedline.Feed.__init__
    contents, request, refused = resolve("feeds_to_inspect:make_feed", MESH, None, Overrides(20, "pad", None, 3))
    assert (contents.rows, request.batch_size, request.remainder) == (100, 20, "pad")
    assert (request.prefetch, request.reading.buffer, refused) == (7, 3, None)
    _, request, refused = resolve("feeds_to_inspect:make_feed", MESH, None, Overrides(22))
    assert request.batch_size == 22
    assert "must be a multiple of the 4 shards" in str(refused)
    assert feedline.Feed.__init__ is usual


# --- values ---


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.int64(7), "7"),
        (np.float32(0.1), "0.1"),
        (np.bool_(True), "True"),
        (np.array([1, 2, 3]), "[1, 2, 3]"),
        (np.array([np.nan, 1e-9]), "[nan, 1e-09]"),
        (np.arange(12, dtype=np.uint8).reshape(3, 4), "0 to 11"),
        (np.zeros((3, 4)), "all 0"),
        (np.array([np.nan, 1, 2, np.inf, -3.25]), "-3.25 to 2, 2 not finite"),
        (np.full(9, np.nan), "9 not finite"),
        (np.arange(9) % 2 == 0, "5 of 9 True"),
        (np.full(5, 3 + 4j), "magnitudes all 5"),
        (np.zeros((0, 3)), "no values"),
        (np.ones(6, jax.numpy.bfloat16), "all 1"),
        (np.array([2**63 - 1] * 5 + [-(2**63)]), f"{-(2**63)} to {2**63 - 1}"),
    ],
)
def test_values_in_a_few_characters(values, text):
    assert shown(np.asarray(values)) == text
