"""A feed over a mixture delivers what loops over single rows say, from sources of any kind, resumed anywhere."""

import functools
import json

import grain
import jax
import mixture_oracle as oracle
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline import Feed, Mixture, Order, Reading
from feedline._src.order.epoch import keys_at, substitutes_at

LENGTHS = {"web": 20, "code": 7, "books": 3}
WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}
COUNTS = (5, 3, 2)
ORDERS = {"code": Order(seed=1, shuffle=False)}


def columns(name, width=4):
    """Rows that tell where they are from."""
    first = {"web": 1000, "code": 2000, "books": 3000}[name]
    index = np.arange(first, first + LENGTHS[name], dtype=np.int32)
    return {"x": index[:, None] * 10 + np.arange(width, dtype=np.int32), "y": {"z": index.astype(np.float32)}}


class Rows:
    """The rows of `columns(name)` as a `RowSource` of the user; reads of row `bad` fail."""

    def __init__(self, name, bad=None):
        self.name, self.bad, self.columns = name, bad, columns(name)
        self.spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self.columns)
        self.identity = {"name": name}

    def __len__(self):
        return LENGTHS[self.name]

    def read(self, rows, out):
        if self.bad in rows:
            raise OSError("unreadable")
        jax.tree.map(lambda to, values: np.copyto(to, values[rows]), out, self.columns)

    def close(self):
        pass


def arrays(**changes):
    sources = {name: columns(name) for name in LENGTHS} | changes.pop("sources", {})
    return Mixture(sources, **{"weights": WEIGHTS, "orders": ORDERS, **changes})


def npy(folder):
    for name in LENGTHS:
        np.save(folder / f"{name}-x.npy", columns(name)["x"])
        np.save(folder / f"{name}-z.npy", columns(name)["y"]["z"])
    return {name: {"x": folder / f"{name}-x.npy", "y": {"z": folder / f"{name}-z.npy"}} for name in LENGTHS}


def expected(order, most=200, end="endless", phases=((0, COUNTS),)):
    """The rows of a run, as columns with the leaf "source"."""
    run = oracle.run(order.lengths, order.orders, phases, end, most)
    sources, rows = [each[1] for each in run], [each[3] for each in run]
    whole = [columns(name) for name in order.names]
    picked = [jax.tree.map(lambda a, row=row: a[row], whole[s]) for s, row in zip(sources, rows, strict=True)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *picked) | {"source": np.array(sources, np.int32)}


def assert_delivers(feed, whole, batches, start=0):
    for _, batch in zip(range(batches), feed, strict=False):
        here = slice(start, start + len(batch["source"]))
        jax.tree.map(lambda a, b, here=here: np.testing.assert_array_equal(a, b[here]), batch, whole)
        start = here.stop
    return start


@pytest.mark.parametrize("end", ["endless", "first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("size", [8, 24, 64])
def test_a_feed_delivers_the_rows_of_the_loops(sharding, end, size):
    mixture = arrays(end=end)
    whole = expected(mixture.order, 200, end)
    with Feed(mixture, size, sharding, remainder="wrap") as feed:
        assert_delivers(feed, whole, 200 // size)
    if end != "endless":
        with Feed(mixture, 8, sharding, epochs=1) as feed:
            assert len(list(feed)) == len(feed) == feed.steps_per_epoch == mixture.order.rows // 8


def test_columns_that_are_cut_are_read_alone(sharding):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    cut = {"source": rows, "x": NamedSharding(mesh, P("data", "model")), "y": {"z": rows}}
    mixture = arrays()
    for source in (
        mixture,
        Mixture({**{n: columns(n) for n in LENGTHS}, "code": Rows("code")}, WEIGHTS, orders=ORDERS),
    ):
        with Feed(source, 10, cut) as feed:
            assert_delivers(feed, expected(mixture.order), 20)


def test_sources_of_any_kind(sharding, tmp_path):
    """A file of arrays, a file of row groups, and a Grain dataset with new random values in each of its epochs."""
    table = pyarrow.table({"y": columns("code")["x"][:, 0], "r": np.zeros(7)})
    pyarrow.parquet.write_table(table, tmp_path / "code.parquet", row_group_size=2)
    np.savez(tmp_path / "web.npz", y=columns("web")["x"][:, 0], r=np.zeros(20))
    augmented = (
        grain.MapDataset.range(3)
        .seed(5)
        .random_map(lambda i, random: {"y": np.int32(30_000 + 10 * i), "r": np.float64(random.random())})
    )
    sources = {"web": tmp_path / "web.npz", "code": tmp_path / "code.parquet", "books": augmented}
    mixture = Mixture(sources, WEIGHTS)
    assert [order.shuffle for order in mixture.order.orders] == [True, True, False]
    run = oracle.run((20, 7, 3), mixture.order.orders, [(0, COUNTS)], "endless", 160)
    with Feed(mixture, 16, sharding) as feed:
        assert feed.spec["y"].dtype == np.int32
        delivered = [jax.tree.map(np.asarray, batch) for _, batch in zip(range(10), feed, strict=False)]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *delivered)
    assert whole["source"].tolist() == [source for _, source, _, _ in run]
    assert whole["y"].tolist() == [10_000 * (s + 1) + 10 * row for _, s, _, row in run]
    randoms = [augmented[epoch * 3 + row]["r"] if s == 2 else 0 for _, s, epoch, row in run]
    np.testing.assert_array_equal(whole["r"], np.float32(randoms))
    assert len(set(randoms)) == 1 + 32  # 0, and one for each of 32 rows of "books"


def test_decoded_records_know_their_place_in_their_source(sharding, tmp_path):
    (tmp_path / "code").mkdir()
    for i in range(7):
        (tmp_path / "code" / f"{i}.txt").write_bytes(bytes([i]))

    def decode(record, out, row):
        out["y"][...] = record[0]
        out["where"][...] = [row.index, row.epoch, row.position, row.key >> 40]

    spec = {"y": jax.ShapeDtypeStruct((), np.int32), "where": jax.ShapeDtypeStruct((4,), np.int32)}
    code = feedline.decoded(tmp_path / "code", decode, spec)
    web = {"y": np.arange(100, 120, dtype=np.int32), "where": np.zeros((20, 4), np.int32)}
    mixture = Mixture({"web": web, "code": code}, {"web": 3, "code": 1}, seed=4)
    run = oracle.run((20, 7), mixture.order.orders, [(0, (3, 1))], "endless", 160)
    keys, position = keys_at(4, 0, np.arange(160)) >> 40, 0
    with Feed(mixture, 16, sharding) as feed:
        for _, batch in zip(range(10), feed, strict=False):
            for y, where in zip(np.asarray(batch["y"]).tolist(), np.asarray(batch["where"]).tolist(), strict=True):
                _, source, epoch, row = run[position]
                own = sum(each[1] == source for each in run[:position]) % 7
                assert (y, where) == ((row, [row, epoch, own, keys[position]]) if source else (100 + row, [0] * 4))
                position += 1


def test_workers_give_the_same_batches_also_where_their_size_changes(sharding, tmp_path):
    mixture = Mixture(npy(tmp_path), WEIGHTS, orders=ORDERS)
    assert mixture.picklable
    with Feed(mixture, [(0, 16), (3, 32)], sharding, reading=Reading(workers=1)) as feed:
        start = assert_delivers(feed, whole := expected(mixture.order), 3)
        assert assert_delivers(feed, whole, 3, start) == 3 * 16 + 3 * 32  # by workers that were told the new size
    with pytest.raises(ValueError, match="this one holds arrays in memory"):
        Feed(arrays(), 16, sharding, reading=Reading(workers=1))


@functools.cache
def a_run(end):
    return expected(arrays(end=end).order, 200, end)


@given(
    st.integers(0, 100),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([8, 24]),
    st.sampled_from(["endless", "first_exhausted", "all_exhausted"]),
)
@settings(max_examples=30)
def test_a_feed_resumes_at_any_position_with_any_batch_size(row, before, after, end):
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), P("data"))
    with Feed(arrays(end=end), before, sharding, remainder="wrap", prefetch=0) as feed:
        feed.seek(*divmod(row, arrays(end=end).order.rows))
        start = assert_delivers(feed, a_run(end), 1, row)
        state = json.loads(json.dumps(feed.get_state()))
    with Feed(arrays(end=end), after, sharding, remainder="wrap", prefetch=0) as feed:
        feed.set_state(state)
        assert_delivers(feed, a_run(end), 2, start)


def test_phases_change_the_weights_and_a_state_takes_another_future(sharding):
    first, then = WEIGHTS, {"web": 0, "code": 1, "books": 1}
    mixture = arrays(weights=[(0, first), (32, then)])
    phases = [(0, COUNTS), (32, (0, 1, 1))]
    with Feed(mixture, 16, sharding) as feed:
        assert_delivers(feed, expected(mixture.order, phases=phases), 2)
        at_32 = feed.get_state()
        assert_delivers(feed, expected(mixture.order, phases=phases), 4, 32)
        at_96 = feed.get_state()
    other = arrays(weights=[(0, first), (32, {"web": 1, "code": 1, "books": 1}), (64, first)])
    with Feed(other, 16, sharding) as feed:
        feed.set_state(at_32)
        assert_delivers(feed, expected(mixture.order, phases=[(0, COUNTS), (32, (1, 1, 1)), (64, COUNTS)]), 5, 32)
        with pytest.raises(ValueError, match=r"its 'order' is \{'phases': .*\[32, \{'code': 1, 'books': 1\}\]"):
            feed.set_state(at_96)
        feed.set_state(at_96, allow=("order",))


def test_states_over_other_mixtures_are_refused(sharding):
    with Feed(arrays(), 16, sharding) as feed:
        next(feed)
        state = feed.get_state()
    others = {
        "order": [
            arrays(weights={**WEIGHTS, "web": 0.6}),
            arrays(seed=1),
            arrays(orders={}),
            arrays(orders={"code": Order(2, False)}),
        ],
        "data": [
            arrays(sources={"code": columns("books"), "books": columns("code")}),
            Mixture({name: columns(name) for name in ("web", "books", "code")}, WEIGHTS, orders=ORDERS),
        ],
    }  # fmt: skip
    for field, mixtures in others.items():
        for mixture in mixtures:
            with Feed(mixture, 16, sharding) as feed, pytest.raises(ValueError, match=f"its {field!r} is"):
                feed.set_state(state)
    with Feed(columns("web"), 16, sharding) as feed, pytest.raises(ValueError, match="its 'rows' is"):
        feed.set_state(state)


@pytest.mark.parametrize("policy", ["substitute", "mask"])
def test_a_bad_row_is_replaced_by_one_of_its_source(sharding, tmp_path, policy):
    mixture = arrays(sources={"code": Rows("code", bad=4)})
    whole = expected(mixture.order)
    bad = np.flatnonzero(whole["y"]["z"] == 2004)
    for position in bad:
        drawn = next(row for row in substitutes_at(0, 7, 0, position) if row != 4)
        whole["x"][position], whole["y"]["z"][position] = columns("code")["x"][drawn], 2000 + drawn
    reading = Reading(bad_rows=policy, bad_rows_budget=0.5, quarantine=tmp_path / "bad.jsonl")
    with Feed(mixture, 16, sharding, reading=reading) as feed:
        if policy == "mask":
            whole["valid"] = ~np.isin(np.arange(200), bad)
        assert_delivers(feed, whole, 10)
    noted = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(note["row"], note["position"]) for note in noted] == [(24, bad[0])]  # once


def test_a_row_that_is_bad_when_a_feed_is_built_is_named_as_a_row_of_the_mixture(sharding):
    rows = grain.MapDataset.range(9).map(lambda i: {"x": np.int32(i)}).filter(lambda row: row["x"] != 4)
    with pytest.raises(feedline.RowError, match=r"left None here.* \(in 'b' of the mixture\) .*row 9"):
        Feed(both({"x": np.zeros(5, np.int32)}, rows), 8, sharding)


SPEC = {"x": np.zeros((5, 4), np.float32)}


def both(a, b, weights=None, **changes):
    return Mixture({"a": a, "b": b}, weights or {"a": 1, "b": 1}, **changes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: both(SPEC, {"x": np.zeros((5, 3), np.float32)}), ValueError,
         r"the same leaves, and batch\['x'\] is float32\[4\] in 'a', float32\[3\] in 'b'; store one like"),
        (lambda: both(SPEC, {"x": SPEC["x"].astype(">f4")}), ValueError, r"float32\[4\] in 'a', >f4\[4\] in 'b'"),
        (lambda: both(SPEC, {**SPEC, "y": np.zeros(5)}), ValueError,
         r"and batch\['y'\] is missing in 'a', float64\[\] in 'b'"),
        (lambda: both(SPEC["x"], SPEC["x"]), ValueError, r"a plain dict .* of 'a' are no dict; name"),
        (lambda: Mixture({"m": both(SPEC, SPEC)}, {"m": 1}), ValueError, "of another mixture pass its sources"),
        (lambda: both(SPEC, {"x": np.zeros((0, 4), np.float32)}), ValueError, "at least one row, got none"),
        (lambda: both(SPEC, grain.MapDataset.range(5).repeat()), ValueError, "'b' has .*; .* leave repeat"),
        (lambda: both(SPEC, grain.MapDataset.range(1 << 62).map(lambda i: SPEC)), ValueError, "'b' has 46"),
        (lambda: both(SPEC, grain.MapDataset.range(5).to_iter_dataset()), TypeError, "'b' is a stream; mix"),
        (lambda: Mixture([SPEC], {"a": 1}), TypeError, "sources must be a dict by name"),
        (lambda: both(SPEC, SPEC, {"a": 1, "b": -0.1}), ValueError,
         "weights: the weight of 'b' must be a finite number and not negative, got -0.1; give a share"),
        (lambda: both(SPEC, SPEC, {"a": float("nan"), "b": 1}), ValueError, "of 'a' must be a finite .* got nan"),
        (lambda: both(SPEC, SPEC, {"a": 1, "b": "1"}), ValueError, "weight of 'b' must be .* got '1'"),
        (lambda: both(SPEC, SPEC, {"a": 1, "b": 0}), ValueError, "'b' is 0, so this source would never be read"),
        (lambda: both(SPEC, SPEC, {"a": 0, "b": 0}), ValueError, "one weight must be above 0, and all are 0"),
        (lambda: both(SPEC, SPEC, {"a": 1, "c": 1}), ValueError, "unknown are 'c'; missing are 'b'"),
        (lambda: both(SPEC, SPEC, [5]), TypeError, "or phases of such dicts as in"),
        (lambda: both(SPEC, SPEC, [(1, {"a": 1, "b": 1})]), ValueError, r"the first at 0, got \[1\]; sort them"),
        (lambda: both(SPEC, SPEC, orders={"c": Order()}), ValueError, "orders: .* unknown are 'c'"),
        (lambda: both(SPEC, SPEC, orders={"a": 5}), TypeError, "orders must be a dict as in"),
        (lambda: both(SPEC, SPEC, seed=-1), ValueError, "seed must be at least 0"),
        (lambda: both(SPEC, SPEC, end="never"), ValueError, "end must be one of .* got 'never'"),
        (lambda: both(SPEC, SPEC, [(0, {"a": 1, "b": 1}), (4, {"a": 1, "b": 0})], end="all_exhausted"),
         ValueError, "'b' has weight 0 before that; give it a weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
