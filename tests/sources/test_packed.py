"""Documents packed into rows: every token once, whole, in any epoch, in any order, on any mesh."""

import itertools
import pickle
import tracemalloc

import jax
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import feedline
from feedline import Feed, Mixture, Packed

lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=120).filter(any)


def documents(lengths):
    """Columns in which each token is its own index in the source, so no two tokens are equal."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return {"tokens": (np.arange(offsets[-1], dtype=np.int64), offsets)}


def rows_of(packed, rows, epoch):
    """Rows as a feed reads them."""
    rows = np.asarray(rows, np.int64)
    out = {name: np.full((len(rows), *leaf.shape), -1, leaf.dtype) for name, leaf in packed.spec.items()}
    where = feedline.Rows(np.full(len(rows), epoch), rows, rows, rows.astype(np.uint64))
    packed.read_positioned(where, out)
    return out


def segments(row):
    """[(tokens, positions) of each segment of a row]. Checks that the segments begin the row, without gaps."""
    ids, positions = row["segment_ids"], row["positions"]
    used = int(np.count_nonzero(ids))
    assert (ids[:used] > 0).all()
    assert (np.isin(np.diff(ids[:used]), [0, 1])).all()
    assert ids[:1] == 1
    assert not ids[used:].any()
    assert not positions[used:].any()
    assert not row["tokens"][used:].any()
    return [(row["tokens"][ids == i], positions[ids == i]) for i in range(1, int(ids.max()) + 1)]


def best_fit_rows(lengths, length):
    """How many rows "best fit decreasing" needs, placing one document after the other."""
    rows = []  # how many tokens still fit into each row
    for size in sorted(filter(None, lengths), reverse=True):
        fitting = [number for number, space in enumerate(rows) if space >= size]
        if not fitting:
            fitting = [len(rows)]
            rows.append(length)
        rows[min(fitting, key=rows.__getitem__)] -= size
    return len(rows)


def check(packed, lengths, length, epoch):
    """Every token stands in one row, and every segment is a document, or a piece of one."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    batch = rows_of(packed, np.arange(len(packed)), epoch)
    seen = []
    for number in range(len(packed)):
        found = segments({name: leaf[number] for name, leaf in batch.items()})
        assert len(found) == len(packed.documents_of(number, epoch))
        for (tokens, positions), document in zip(found, packed.documents_of(number, epoch), strict=True):
            assert tokens.tolist() == list(range(tokens[0], tokens[0] + len(tokens)))  # side by side in the source
            assert offsets[document] <= tokens[0]
            assert tokens[-1] < offsets[document + 1]
            assert positions.tolist() == list(range(len(tokens)))
            seen.append(tokens)
    assert sorted(np.concatenate(seen).tolist()) == list(range(offsets[-1]))
    return batch, seen


@settings(max_examples=200, deadline=None)
@given(lengths_of_documents, st.integers(1, 40), st.none() | st.integers(1, 4), st.integers(0, 3))
def test_best_fit_holds_every_token_once(lengths, length, most, epoch):
    packed = Packed(documents(lengths), length, max_documents=most)
    _, seen = check(packed, lengths, length, epoch)
    pieces = [piece for size in lengths for piece in [length] * (size // length) + [size % length]]
    assert sorted(map(len, seen)) == sorted(filter(None, pieces))  # no document that fits is cut
    assert most is not None or len(packed) == best_fit_rows(pieces, length)
    assert most is None or all(len(packed.documents_of(row, epoch)) <= most for row in range(len(packed)))
    assert packed.cut == sum(size > length for size in lengths)
    assert packed.fill == sum(lengths) / (len(packed) * length)


@settings(max_examples=100, deadline=None)
@given(lengths_of_documents, st.integers(1, 60), st.integers(0, 3))
def test_split_leaves_padding_in_the_last_row_alone(lengths, length, epoch):
    packed = Packed(documents(lengths), length, packing="split")
    batch, seen = check(packed, lengths, length, epoch)
    assert (batch["segment_ids"][:-1] > 0).all()
    assert len(packed) == -(-sum(lengths) // length)
    assert len(seen) <= np.count_nonzero(lengths) + len(packed)  # cuts are at the ends of rows only


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32), st.integers(8, 512), st.sampled_from(["best_fit", "split"]), st.integers(0, 9))
def test_a_million_documents_are_packed_right(seed, length, packing, epoch):
    random = np.random.default_rng(seed)
    lengths = random.lognormal(random.uniform(0, 3), random.uniform(0.1, 1), 2000).astype(np.int64).clip(max=100)
    lengths[0] += 1
    check(Packed(documents(lengths), length, packing=packing, seed=seed), lengths, length, epoch)


def test_documents_meet_others_in_each_epoch():
    lengths = np.random.default_rng(0).integers(1, 20, 400)
    packed = Packed(documents(lengths), 64)
    together = [
        {frozenset(packed.documents_of(row, epoch).tolist()) for row in range(len(packed))} for epoch in (0, 1)
    ]
    assert len(together[0] & together[1]) < len(packed) / 10
    fixed = Packed(documents(lengths), 64, repack=False)
    for row in range(len(fixed)):
        assert fixed.documents_of(row, 0).tolist() == fixed.documents_of(row, 7).tolist()
    other = Packed(documents(lengths), 64, seed=1)
    assert [packed.documents_of(row).tolist() for row in range(20)] != [
        other.documents_of(row).tolist() for row in range(20)
    ]


def test_longer_documents_are_dropped_when_asked_and_counted():
    packed = Packed(documents([3, 9, 4, 0, 8]), 7, longer="drop")
    assert (packed.left_out, packed.cut, packed.documents, packed.tokens) == (2, 0, 4, 7)
    assert sorted(packed.documents_of(0).tolist()) == [0, 2]


@pytest.mark.parametrize(("packing", "limit"), [("best_fit", 17), ("split", 25)])
def test_bytes_a_document_are_those_that_the_docs_name(packing, limit):
    offsets = np.arange(0, 700_000, 7)
    values = np.zeros(offsets[-1], np.uint16)
    tracemalloc.start()
    try:
        packed = Packed((values, offsets.copy()), 512, packing=packing)
        assert tracemalloc.get_traced_memory()[0] < limit * packed.documents
    finally:
        tracemalloc.stop()


def delivered(source, batch_size, sharding, state=None, batches=None, epochs=2, **options):
    with Feed(source, batch_size, sharding, epochs=epochs, **options) as feed:
        if state is not None:
            feed.set_state(state)
        found = [jax.tree.map(np.asarray, batch) for batch in itertools.islice(feed, batches)]
        return found, feed.get_state()


def test_rows_are_the_same_on_any_mesh_and_after_a_resume(sharding):
    lengths = np.random.default_rng(1).integers(1, 30, 600)
    packed = Packed(documents(lengths), 64)
    whole, _ = delivered(packed, 8, sharding)
    first, state = delivered(packed, 8, sharding, batches=3)
    one = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    rest, _ = delivered(packed, 8, one, state)
    jax.tree.map(np.testing.assert_array_equal, whole, first + rest)
    epochs = len(whole) // 2
    tokens = [
        np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in part])
        for part in (whole[:epochs], whole[epochs:])
    ]
    assert all(len(set(part.tolist())) == len(part) for part in tokens)


def test_packed_sources_are_mixed(sharding):
    a, b = (Packed(documents(np.random.default_rng(i).integers(1, 30, 300)), 32) for i in range(2))
    mixture = Mixture({"a": a, "b": b}, {"a": 3, "b": 1})
    found, _ = delivered(mixture, 8, sharding, batches=4, epochs=None)
    again, _ = delivered(mixture, 16, sharding, batches=2, epochs=None)

    def join(batches):
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)

    jax.tree.map(np.testing.assert_array_equal, join(found), join(again))
    sources = np.concatenate([batch["source"] for batch in found])
    assert np.bincount(sources).tolist() == [24, 8]


@pytest.mark.parametrize("packing", ["best_fit", "split"])
def test_tokens_are_counted_by_source_and_as_they_come(packing, sharding):
    a, b = (Packed(documents(np.random.default_rng(i).integers(1, 30, 90)), 32, packing=packing) for i in range(2))
    for source, names in ((a, ["all"]), (Mixture({"a": a, "b": b}, {"a": 3, "b": 1}), ["a", "b"])):
        with Feed(source, 8, sharding, remainder="wrap") as feed:
            assert feed.statistics().tokens == dict.fromkeys(names, 0)
            counts = dict.fromkeys(names, 0)
            for number, batch in zip(range(24), feed, strict=False):
                real = np.count_nonzero(batch["segment_ids"], axis=1)
                for i, name in enumerate(names):
                    counts[name] += int(
                        real[np.asarray(batch["source"]) == i].sum() if len(names) > 1 else real.sum()
                    )
                if number % 5 == 0:
                    assert feed.statistics().tokens == counts
            assert feed.statistics().tokens == counts
            assert f"tokens {names[0]} " in str(feed.statistics())
            feed.seek(0)
            assert feed.statistics().tokens == dict.fromkeys(names, 0)
    with Feed({"x": np.zeros(64)}, 8, sharding) as feed:
        assert feed.statistics().tokens is None


@pytest.fixture
def files(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 30, 200)
    values, offsets = documents(lengths)["tokens"]
    np.save(tmp_path / "values.npy", values.astype(np.uint16))
    np.save(tmp_path / "offsets.npy", offsets)
    return tmp_path, lengths


def test_paths_travel_to_workers(files, sharding):
    folder, _ = files
    packed = Packed({"tokens": (str(folder / "values.npy"), str(folder / "offsets.npy"))}, 64)
    assert packed.picklable
    assert not Packed(documents([3]), 4).picklable
    clone = pickle.loads(pickle.dumps(packed))
    assert clone.identity == packed.identity
    jax.tree.map(np.testing.assert_array_equal, rows_of(clone, [3, 0], 1), rows_of(packed, [3, 0], 1))


def test_columns_are_arrays_paths_or_pyarrow_lists(files):
    folder, lengths = files
    values, offsets = documents(lengths)["tokens"]
    values = values.astype(np.uint16)
    lists = [values[a:b] for a, b in itertools.pairwise(offsets)]
    chunks = pa.chunked_array(
        [pa.array(lists[:70], pa.list_(pa.uint16())), pa.array(lists[70:], pa.list_(pa.uint16()))]
    )
    expected = rows_of(Packed((values, offsets), np.int64(64)), np.arange(10), 2)
    strided = np.stack([values, values + 1], axis=1)[:, 0], offsets
    for column in ((str(folder / "values.npy"), offsets), chunks, strided, (values[::-1].copy()[::-1], offsets)):
        jax.tree.map(
            np.testing.assert_array_equal, rows_of(Packed({"tokens": column}, 64), np.arange(10), 2), expected
        )


def test_documents_in_a_store_are_fetched_ahead(bucket, files, sharding, monkeypatch):
    folder, _ = files
    monkeypatch.setenv("FEEDLINE_CACHE", str(folder / "cache"))
    bucket.objects["/corpus/values.npy"] = (folder / "values.npy").read_bytes()
    offsets = np.load(folder / "offsets.npy")
    local = Packed({"tokens": (str(folder / "values.npy"), offsets)}, 64, repack=False)
    remote = Packed({"tokens": ("s3://corpus/values.npy", offsets)}, 64)
    assert not remote.repack
    assert remote.identity == local.identity
    assert remote.will_read(np.arange(4), 0)
    for source in (remote, Packed({"tokens": ("s3://corpus/values.npy", offsets)}, 64, repack=True)):
        expected = Packed({"tokens": (str(folder / "values.npy"), offsets)}, 64, repack=source.repack)
        jax.tree.map(
            np.testing.assert_array_equal, delivered(source, 8, sharding)[0], delivered(expected, 8, sharding)[0]
        )


def test_columns_by_token_stay_beside_their_tokens():
    lengths = np.random.default_rng(0).integers(1, 30, 100)
    values, offsets = documents(lengths)["tokens"]
    weights = (values % 7 / 7).astype(np.float32)
    batch = rows_of(Packed({"tokens": (values, offsets), "weights": (weights, offsets)}, 50), np.arange(20), 0)
    used = batch["segment_ids"] > 0
    assert batch["weights"].dtype == np.float32
    np.testing.assert_array_equal(batch["weights"][used], (batch["tokens"][used] % 7 / 7).astype(np.float32))
    assert not batch["weights"][~used].any()


def test_a_token_that_does_not_fit_its_dtype_is_a_bad_row():
    packed = Packed((np.array([1, 2**40, 3]), np.array([0, 1, 2, 3])), 1)
    with pytest.raises(feedline.RowError, match="'tokens' does not fit int32"):
        rows_of(packed, np.arange(3), 0)
    assert rows_of(Packed((np.array([1, 2**40]), np.array([0, 2])), 2, dtype=None), [0], 0)["tokens"].tolist() == [
        [1, 2**40]
    ]


ONE = {"tokens": (np.arange(3), np.array([0, 3]))}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"tokens": (np.arange(3), np.array([0, 4]))}, {}, "at most the number of values, 3"),
        ({"tokens": (np.zeros((3, 2)), np.array([0, 3]))}, {}, "must have one axis"),
        ({"positions": ONE["tokens"]}, {}, "rename"),
        ({"a": ONE["tokens"], "b": (np.arange(3), np.array([0, 1, 3]))}, {}, "the same offsets"),
        ({}, {}, "one column or more"),
        ({"tokens": 5}, {}, "a column of documents is a tuple"),
        ({"tokens": (np.arange(3), np.array([0, 0]))}, {}, "at least one document"),
        (pa.chunked_array([], pa.list_(pa.int32())), {}, "at least one list"),
        (pa.array([[1, None]]), {}, "numbers without nulls"),
        (pa.array([["a"]]), {}, "numbers without nulls"),
        (ONE, {"length": 0}, "length must be"),
        (ONE, {"length": 1 << 40}, "length must be at most 2147483647"),  # positions are int32
        (ONE, {"packing": "first_fit"}, "packing must be one of"),
        (ONE, {"longer": "keep"}, "longer must be one of"),
        (ONE, {"packing": "split", "longer": "drop"}, "longer and max_documents are for"),
        (ONE, {"max_documents": 0}, "max_documents must be"),
        (ONE, {"seed": 1 << 64}, "seed must be"),
        (ONE, {"length": 2, "longer": "drop"}, "at least one document must be no longer than 2, got 1 longer"),
    ],
)  # fmt: skip
def test_bad_columns_and_options_are_named(columns, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Packed(columns, **{"length": 4, **options})
