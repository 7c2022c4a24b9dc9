"""JAX's thread-local settings at the time a feed is built hold wherever it reads, transforms and places."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from background import PATIENCE_S, spawn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline import Feed, Order, Reading, RowError, prefetch_to_mesh
from feedline._src.runtime.threads import JaxSettings

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
IN_ORDER = Order(shuffle=False)
WIDE = 2**40 + np.arange(32)
TINY = 1e-300 * np.arange(1, 33)
"""The values of `WIDE` and `TINY` change when they are stored in 32 bits."""


def wide(i):
    return {"n": np.int64(WIDE[i]), "f": np.float64(TINY[i])}


def wide_by_jax(i):
    """A map function that computes with JAX, on any thread of Grain."""
    return {"n": np.asarray(jnp.asarray(WIDE)[i]), "f": np.asarray(jnp.asarray(TINY)[i])}


def computed_by_jax(batch, rows):
    return {"n": np.asarray(jnp.asarray(WIDE)[rows.index]), "f": np.asarray(jnp.asarray(TINY)[rows.index])}


def lane(index, count):
    # without threads of Grain's own, which our settings do not reach
    return grain.MapDataset.range(index, 32, count).map(wide_by_jax).to_iter_dataset(grain.ReadOptions(0, 0))


def test_a_state_moves_between_32_and_64_bits():
    """The fingerprint has the source's dtypes, which x64 does not change. `feed.spec` has JAX's dtypes."""
    rows = {"n": np.arange(32), "f": np.arange(32.0)}
    told = {"batch['f']": ["float64", []], "batch['n']": ["int64", []]}
    for wide_after in (True, False):
        with jax.enable_x64(not wide_after), Feed(rows, 8, SHARDING) as feed:
            first = np.asarray(next(feed)["n"])
            state = feed.get_state()
            second = np.asarray(next(feed)["n"])
        with jax.enable_x64(wide_after), Feed(rows, 8, SHARDING) as feed:
            feed.set_state(state)
            assert feed.spec["n"].dtype == (np.int64 if wide_after else np.int32)
            assert state["fingerprint"]["spec"] == feed.get_state()["fingerprint"]["spec"] == told
            assert first.tolist() != second.tolist() == np.asarray(next(feed)["n"]).tolist()


def check(batches):
    assert [batch["n"].dtype for batch in batches] == [np.int64] * 4
    assert [batch["f"].dtype for batch in batches] == [np.float64] * 4
    assert np.concatenate([np.asarray(batch["n"]) for batch in batches]).tolist() == WIDE.tolist()
    assert np.concatenate([np.asarray(batch["f"]) for batch in batches]).tolist() == TINY.tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "source",
    [
        {"n": WIDE, "f": TINY},
        grain.MapDataset.range(32).map(wide),
        grain.MapDataset.range(32).map(wide_by_jax),
        lane(0, 1),
    ],
    ids=["columns", "records", "computed records", "stream"],
)
def test_a_feed_built_in_a_64_bit_context_delivers_64_bits(source, prefetch):
    order = None if isinstance(source, grain.IterDataset) else IN_ORDER
    with jax.enable_x64(True):
        feed = Feed(source, 8, SHARDING, order=order, epochs=1, prefetch=prefetch)
    with feed:  # outside of the context, the feed stays as it was built, also after a move
        batches = [next(feed), next(feed)]
        feed.move(jax.devices()[1])
        assert (feed.spec["n"].dtype, feed.spec["f"].dtype) == (np.int64, np.float64)
        check([*batches, *feed])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_transform_computes_in_64_bits(workers, tmp_path):
    np.save(tmp_path / "n.npy", np.arange(32))
    reading = Reading(workers=workers)
    with jax.enable_x64(True):
        source = {"n": str(tmp_path / "n.npy")}
        feed = Feed(source, 8, SHARDING, order=IN_ORDER, epochs=1, transform=computed_by_jax, reading=reading)
    with feed:
        check(list(feed))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_feed_built_outside_of_the_context_keeps_its_32_bits_in_it(prefetch):
    with Feed({"n": np.arange(32)}, 8, SHARDING, order=IN_ORDER, epochs=1, prefetch=prefetch) as feed:
        with jax.enable_x64(True):
            batches = [next(feed)]
            feed.move(jax.devices()[1])
            batches += feed
        assert [batch["n"].dtype for batch in batches] == [feed.spec["n"].dtype] * 4 == [np.int32] * 4


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_to_mesh_places_64_bits(prefetch, copy):
    def batches():
        for start in range(0, 32, 8):  # on the background thread
            here = slice(start, start + 8)
            yield {"n": np.asarray(jnp.asarray(WIDE[here])), "f": np.asarray(jnp.asarray(TINY[here]))}

    with jax.enable_x64(True):
        placed = prefetch_to_mesh(batches(), SHARDING, prefetch, copy=copy)
    check(list(placed))


def test_prefetch_to_mesh_refuses_what_32_bits_cannot_hold():
    for batch, found in (({"n": WIDE}, "1099511627776 does not fit"), ({"f": np.full(8, 1e300)}, "1e\\+300")):
        with pytest.raises(RowError, match=found):
            next(prefetch_to_mesh(iter([batch]), SHARDING))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_x64", True),
        ("default_device", jax.devices()[3]),
        ("default_matmul_precision", "highest"),
        ("default_prng_impl", "rbg"),
        ("threefry_partitionable", False),
    ],
)
def test_each_setting_holds_on_another_thread_only_while_it_is_applied(name, value):
    def here():
        return getattr(jax.config, f"jax_{name}")

    before = here()
    assert before != value
    with getattr(jax, name)(value):
        settings = JaxSettings.of_this_thread()
    seen = []

    def elsewhere():
        seen.append(here())
        with settings.applied():
            seen.append(here())
        seen.append(here())

    spawn(elsewhere).result(PATIENCE_S)
    assert seen == [before, value, before]
