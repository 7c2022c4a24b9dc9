"""Ragged leaves: rows of different lengths, padded to the bucket of their batch, against loops in Python."""

import itertools

import jax
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline import Feed, Mixture, Order, Ragged, Reading
from feedline._src.order.epoch import rows_at

N, B, PAD_TO, PAD = 43, 8, (3, 6, 20), 7
_SHARES = {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.2, 4: 0.1, 6: 0.05, 7: 0.03, 20: 0.02}
LENGTHS = np.random.default_rng(1).choice(list(_SHARES), N, p=list(_SHARES.values()))


def ragged(lengths, shape=(), dtype=np.int32):
    """Values and offsets of rows with these lengths. No two values are equal, and none is padding."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(offsets[-1])
    return np.arange(8, 8 + count * int(np.prod(shape)), dtype=dtype).reshape(count, *shape), offsets


def padded(values, offsets, rows, length, pad=PAD):
    """The oracle: one row after the other."""
    out = np.full((len(rows), length, *values.shape[1:]), pad, values.dtype)
    for i, row in enumerate(rows):
        for k in range(offsets[row + 1] - offsets[row]):
            out[i, k] = values[offsets[row] + k]
    return out


def bucket(lengths, pad_to):
    return next(length for length in pad_to if length >= max(lengths))


def columns(folder=None):
    """Two ragged leaves with different lengths and a plain column, in memory or as files."""
    boxes = ragged(LENGTHS[::-1] // 2, (2,), np.float32)
    arrays = {"tokens": ragged(LENGTHS), "boxes": boxes, "y": np.arange(N, dtype=np.int32)}
    if folder is None:
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    paths = [folder / f"{i}.npy" for i in range(len(leaves))]
    for path, leaf in zip(paths, leaves, strict=True):
        np.save(path, leaf)
    return jax.tree.unflatten(tree, [str(paths[0]), *paths[1:]])


def documents(folder=None):
    return Ragged(columns(folder), PAD_TO, PAD)


def check(batch, rows):
    """Check a batch that must hold these rows. Returns its bucket."""
    given, rows = columns(), list(rows)
    lengths = {name: np.diff(given[name][1])[rows] for name in ("tokens", "boxes")}
    length = bucket(np.concatenate(list(lengths.values())), PAD_TO)
    np.testing.assert_array_equal(batch["y"], rows)
    for name in ("tokens", "boxes"):
        np.testing.assert_array_equal(batch[name], padded(*given[name], rows, length))
        np.testing.assert_array_equal(batch[f"{name}_length"], lengths[name])
        assert batch[f"{name}_length"].dtype == np.int32
    return length


# --- reading ---


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.lists(st.integers(1, 14), min_size=1, max_size=4, unique=True),
    st.sampled_from([(), (2,)]),
    st.sampled_from([np.uint8, np.int64, np.float32]),
    st.sampled_from([np.int64, np.uint32, np.uint64]),
    st.data(),
)
def test_rows_are_read_as_by_a_loop(lengths, pad_to, shape, dtype, of_offsets, data):
    pad_to = sorted({*pad_to, max(lengths)} if max(pad_to) < max(lengths) else pad_to)
    values, offsets = ragged(lengths, shape, dtype)
    source = Ragged({"tokens": (values, offsets.astype(of_offsets))}, pad_to, PAD)
    rows = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9)), np.int64)
    expected = bucket([lengths[row] for row in rows] or [0], pad_to)
    assert source.padded_length(rows) == expected
    longer = {expected, *pad_to[pad_to.index(expected) :], expected + 1}
    for length, strided in itertools.product(longer, (False, True)):
        wide = np.ones((len(rows), length, *shape, 2), dtype)
        tokens = wide[..., 0] if strided else wide[..., 0].copy()
        out = {"tokens": tokens, "tokens_length": np.ones(len(rows), np.int32)}
        source.read(rows, out)
        np.testing.assert_array_equal(out["tokens"], padded(values, offsets, rows, length))
        np.testing.assert_array_equal(out["tokens_length"], np.array(lengths)[rows])
        assert (wide[..., 1] == 1).all()


@pytest.mark.parametrize(
    "other",
    [
        Ragged(columns(), (*PAD_TO, 30), PAD),
        Ragged(columns(), PAD_TO, 0),
        Ragged({**columns(), "y": np.arange(N)[::-1].astype(np.int32)}, PAD_TO, PAD),
        Ragged({**columns(), "tokens": ragged(LENGTHS[::-1])}, PAD_TO, PAD),
        Ragged({**columns(), "tokens": (ragged(LENGTHS)[0] + 1, ragged(LENGTHS)[1])}, PAD_TO, PAD),
    ],
    ids=["buckets", "pad", "plain", "lengths", "values"],
)
def test_the_identity_tells_sources_apart(other):
    assert other.identity != documents().identity


# --- feeds ---


def test_a_step_is_compiled_once_for_each_bucket(sharding):
    traced = []

    @jax.jit
    def step(batch):
        traced.append(batch["tokens"].shape)
        return batch["tokens"].sum()

    seen = set()
    with Feed(documents(), B, sharding, epochs=6) as feed:
        assert feed.spec["tokens"].shape == (B, PAD_TO[-1])
        for batch in feed:
            step(batch).block_until_ready()  # so no steps pile up, each with its batch
            seen.add(batch["tokens"].shape)
            assert batch["tokens"].sharding == feed.spec["tokens"].sharding
        slabs, batches = feed.statistics().slabs, feed.statistics().batches
    assert sorted(traced) == sorted(seen) == [(B, length) for length in PAD_TO]
    assert slabs <= 5 * 10 < 5 * batches  # slabs of one size serve all buckets


def test_meshes_and_threads_make_no_difference(sharding, delivered, tmp_path):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    cut = dict.fromkeys(("tokens", "tokens_length", "boxes_length", "y"), rows)
    cut["boxes"] = NamedSharding(mesh, P("data", None, "model"))
    expected = delivered(Feed(documents(), B, sharding, epochs=1))
    for place, threads, buffer in [(rows, 1, 1), (cut, 3, 1), (cut, 1, 2), (jax.devices()[0], 3, 1)]:
        got = delivered(
            Feed(documents(tmp_path), B, place, epochs=1, reading=Reading(threads=threads, buffer=buffer))
        )
        assert len(got) == len(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    got = delivered(Feed(documents(), B, rows, epochs=1, prefetch=0))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 30), min_size=5, max_size=25).filter(any),
    st.integers(1, 5),
    st.sampled_from([(30,), (1, 30), (5, 10, 30), (4, 8, 12, 16, 40)]),
    st.sampled_from(["drop", "pad", "wrap"]),
)
def test_a_feed_resumes_anywhere(lengths, batch_size, pad_to, remainder):
    values, offsets = ragged(lengths)
    source = Ragged({"tokens": (values, offsets), "y": np.arange(len(lengths), dtype=np.int32)}, pad_to)
    arguments = {"sharding": jax.devices()[0], "epochs": 2, "remainder": remainder, "prefetch": 0}
    with Feed(source, batch_size, **arguments) as feed:
        states, batches = [], []
        for batch in feed:
            batches.append(jax.tree.map(np.asarray, batch))
            states.append(feed.get_state())
            rows = batches[-1]["y"]
            length = bucket(np.array(lengths)[rows], pad_to)
            np.testing.assert_array_equal(batches[-1]["tokens"], padded(values, offsets, rows, length, 0))
        for state, rest in zip(states[:-1], batches[1:], strict=True):
            feed.set_state(state)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, next(feed)), rest)


@pytest.mark.slow
def test_workers_deliver_the_same(sharding, delivered, tmp_path):
    expected = delivered(Feed(documents(), B, sharding, epochs=1))
    got = delivered(Feed(documents(tmp_path), B, sharding, epochs=1, reading=Reading(workers=2)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("policy", ["substitute", "mask"])
def test_substitutes_fit_the_bucket(policy, sharding, delivered):
    values, offsets = ragged(LENGTHS, dtype=np.int64)
    bad = np.flatnonzero(LENGTHS)[::5]
    values[offsets[bad]] = 2**40  # does not fit int32
    source = Ragged({"tokens": (values, offsets), "y": np.arange(N, dtype=np.int32)}, PAD_TO, PAD)
    order, passes = Order(seed=2), []
    for threads in (1, 3):
        reading = Reading(threads=threads, buffer=1, bad_rows=policy, bad_rows_budget=N)
        passes.append(delivered(Feed(source, B, sharding, order=order, epochs=1, reading=reading)))
    jax.tree.map(np.testing.assert_array_equal, *passes)
    replaced = 0
    for batch, rows in zip(passes[0], rows_at(order, N, 0, np.arange(N // B * B)).reshape(-1, B), strict=True):
        length = bucket(LENGTHS[rows], PAD_TO)  # the bucket of the order's rows, not of substitutes
        np.testing.assert_array_equal(batch["tokens"], padded(values, offsets, batch["y"], length))
        assert not np.isin(batch["y"], bad).any()
        np.testing.assert_array_equal(batch["y"] != rows, np.isin(rows, bad))
        if policy == "mask":
            np.testing.assert_array_equal(batch["valid"], ~np.isin(rows, bad))
        replaced += np.isin(rows, bad).sum()
    assert replaced > B // 2


def test_a_mixture_has_the_bucket_of_all_its_rows(sharding, delivered):
    web, code = ragged(LENGTHS), ragged(LENGTHS[::-1] // 3)
    sources = {
        name: Ragged({"a": np.arange(N, dtype=np.int32), "tokens": tokens}, PAD_TO, PAD)
        for name, tokens in (("web", web), ("code", code))
    }
    mixture = Mixture(sources, {"web": 1, "code": 3}, end="all_exhausted")
    seen = set()
    for batch in delivered(Feed(mixture, B, sharding, epochs=1)):
        rows = list(zip(batch["source"].tolist(), batch["a"].tolist(), strict=True))
        lengths = [np.diff((web, code)[source][1])[row] for source, row in rows]
        length = bucket(lengths, PAD_TO)
        expected = [padded(*(web, code)[source], [row], length)[0] for source, row in rows]
        np.testing.assert_array_equal(batch["tokens"], expected)
        np.testing.assert_array_equal(batch["tokens_length"], lengths)
        seen.add(length)
    assert seen == set(PAD_TO)


def test_a_mixture_of_sources_with_other_ragged_leaves_has_the_largest_length(sharding):
    zeros = np.zeros((N, PAD_TO[-1]), np.int32)
    sources = {
        name: Ragged({name: ragged(LENGTHS), other: zeros, f"{other}_length": zeros[:, 0]}, PAD_TO)
        for name, other in ("xy", "yx")
    }
    with Feed(Mixture(sources, {"x": 1, "y": 1}), B, sharding) as feed:
        assert {next(feed)[name].shape for name in "xy"} == {(B, PAD_TO[-1])}


@pytest.mark.parametrize("name", ["tokens", "a"])
def test_values_of_rows_are_counted_as_tokens(name, sharding):
    other = ragged(LENGTHS[::-1])
    with Feed(Ragged({"b": other, name: ragged(LENGTHS)}, PAD_TO), B, sharding) as feed:
        counted = f"{'tokens' if name == 'tokens' else 'b'}_length"
        total = sum(int(batch[counted].sum()) for batch in itertools.islice(feed, 5))
        assert feed.statistics().tokens == {"all": total}


def test_columns_of_arrow_are_rows_of_different_lengths(tmp_path):
    lists = [[1, 2], [], [3, 4, 5]]
    source = Ragged({"x": pa.chunked_array([lists[:1], lists[1:]]), "y": pa.array([7, 8, 9])}, (3,))
    assert [source[row]["x"][: source[row]["x_length"]].tolist() for row in range(3)] == lists
    assert source[2]["y"] == 9


# --- bad input ---


GOOD = ragged([1, 2, 3])


@pytest.mark.parametrize(
    ("given", "pad_to", "pad", "message"),
    [
        ({"x": GOOD}, (1, 2), 0, r"hold every row, and row 2 of 'x' has length 3.*add a larger bucket"),
        ({"x": GOOD}, (4, 3), 0, r"ascending integers, got \(4, 3\); use \(3, 4\)"),
        ({"x": GOOD}, (4.5,), 0, r"each of pad_to"),
        ({"x": GOOD}, (1 << 31,), 0, r"each of pad_to must be at most 2147483647"),
        ({"x": GOOD}, 4, 0, r"a sequence of integers, got 4"),
        ({"x": GOOD}, (4,), 0.5, r"a value of int32, the dtype of 'x', got 0.5"),
        ({"x": GOOD}, (4,), 1 << 70, r"a value of int32, the dtype of 'x', got 1180591620717411303424"),
        ({"x": GOOD}, (4,), "0", r"pad must be a number, got '0'"),
        ({"x": GOOD}, (4,), [0, 0], r"pad must be a number, got \[0, 0\]"),
        ({"x": GOOD, "x_length": np.arange(3)}, (4,), 0, r"the leaf 'x_length', and columns have that key, too"),
        ({"x": GOOD, "y": np.arange(4)}, (4,), 0, r"same number of rows, got x: 3, the plain columns: 4"),
        ({"x": (*GOOD, GOOD[1])}, (4,), 0, r"a tuple \(values, offsets\), .* got a tuple with 3 arrays for 'x'"),
        ({"x": (GOOD, GOOD[1])}, (4,), 0, r"a tuple \(values, offsets\), .* got a tuple with 3 arrays for 'x'"),
        ({"x": np.arange(3)}, (4,), 0, r"got none; pass plain columns to Feed"),
        ([GOOD], (4,), 0, r"a dict with string keys"),
        ({"x": (GOOD[0], np.array([0, 3, 1, 6]))}, (6,), 0, r"must not decrease, .* got 3 to 1 at row 1 for 'x'"),
        ({"x": (GOOD[0], np.array([0, 3, 7]))}, (6,), 0, r"at most the number of values, 6, got \[0 7\] for 'x'"),
        ({"x": (GOOD[0], np.array([-1, 3, 6]))}, (6,), 0, r"be at least 0 .* got \[-1 +6\] for 'x'"),
        ({"x": (GOOD[0], np.array([0.0, 6.0]))}, (6,), 0, r"integers in one axis, .* got float64\[2\] for 'x'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(given, pad_to, pad, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Ragged(given, pad_to, pad)
