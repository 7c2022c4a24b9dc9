"""Each practice changes what it says, and not what is learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mlp_tasks import made_up_rows, sharding_of

import feedline
from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import compiled
from feedline._src.trainer.task import Task
from feedline.trainer import Practices, fit

ROWS = made_up_rows(256)
SIZES = Sizes(features=64, classes=10, layers=2, width=32)


def fitted(practices=Practices(), mode="jit_multi", steps=20, **options):  # noqa: B008
    init, loss = classifier(SIZES)
    with feedline.Feed(ROWS, 64, sharding_of(mode), order=feedline.Order(seed=2)) as feed:
        return fit(feed, init, loss, optax.adam(3e-3), mode=mode, steps=steps, practices=practices, **options)


def losses(result):
    return [entry["loss"] for entry in result.history]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "practices"),
    [
        ("jit_multi", {"shard_state": True}),
        ("jit_multi", {"donate_state": False}),
        ("pmap", {"donate_state": False, "guard_transfers": False}),
    ],
    ids=str,
)
def test_the_losses_stay_the_same(mode, practices):
    np.testing.assert_allclose(losses(fitted(Practices(**practices), mode)), losses(fitted(mode=mode)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit_multi", "pmap"])
def test_bfloat16_is_computed_with_float32_weights(mode):
    result = fitted(Practices(compute="bfloat16"), mode, steps=60)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses(result), losses(fitted(mode=mode, steps=60)), rtol=0.05)
    seen = []

    def loss(params, batch):
        seen.append((params.dtype.name, batch["x"].dtype.name, batch["n"].dtype.name))
        return jnp.mean(params * batch["x"]), {}

    rows = {"x": np.ones(64, np.float32), "n": np.ones(64, np.int32)}
    with feedline.Feed(rows, 64, sharding_of(mode)) as feed:
        fit(feed, lambda key: jnp.ones(()), loss, optax.sgd(0.1), mode=mode, steps=1,
            practices=Practices(compute="bfloat16"))  # fmt: skip
    assert set(seen) == {("bfloat16", "bfloat16", "int32")}


def test_a_sharded_state_is_split_over_the_axis_of_the_rows():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
    batch = {"x": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data", "model")))}

    def loss(p, b):
        return jnp.mean(b["x"] @ p["w"].T + p["b"]) + p["v"].sum(), {}

    params = {"w": jnp.ones((3, 4)), "v": jnp.ones((4, 8)), "b": jnp.ones(3)}
    task = Task(lambda key: params, loss, optax.adam(0.1))
    program = compiled(task, "jit_multi", batch, Practices(shard_state=True))
    state, _ = program.step(program.start(), batch)
    for params in (state.params, state.optimizer[0].mu):
        assert [params[name].sharding.spec for name in "wvb"] == [P(None, "data"), P(None, "data"), P()]
        assert params["v"].addressable_shards[0].data.shape == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_checkpoint_may_be_of_a_sharded_or_a_replicated_state(before, after, tmp_path):
    whole = fitted(steps=20)
    fitted(Practices(shard_state=before), steps=12, checkpoint_dir=tmp_path)
    rest = fitted(Practices(shard_state=after), steps=20, checkpoint_dir=tmp_path)
    assert (rest.progress.resumed, rest.history[-1]["step"]) == (12, 20)
    np.testing.assert_allclose(losses(rest)[-1], losses(whole)[-1], rtol=1e-5)
    kernel = rest.params["hidden"][0]["kernel"][...]
    assert kernel.sharding.is_fully_replicated != after


def test_a_step_may_transfer_where_nothing_guards_it():
    class OnTheHost:
        """Batches that nobody placed."""

        spec = {"x": jax.ShapeDtypeStruct((64,), np.float32, sharding=sharding_of("jit_multi"))}  # noqa: RUF012

        def __iter__(self):
            return iter([{"x": np.ones(64, np.float32)}] * 3)

    def loss(params, batch):
        return jnp.mean(params * batch["x"]), {}

    arguments = (OnTheHost(), lambda key: jnp.ones(()), loss, optax.sgd(0.1))
    assert fit(*arguments, practices=Practices(guard_transfers=False)).progress.step == 3
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        fit(*arguments)


def test_refused():
    with pytest.raises(ValueError, match='shard_state needs mode "jit_multi", got "pmap"'):
        fitted(Practices(shard_state=True), "pmap")
    batch = {"x": jax.device_put(np.ones((8, 8), np.float32), NamedSharding(sharding_of("jit_multi").mesh, P()))}
    task = Task(lambda key: jnp.ones(8), lambda p, b: (jnp.mean(b["x"] @ p), {}), optax.sgd(0.1))
    with pytest.raises(ValueError, match="shard_state splits the state over the devices among which rows are"):
        compiled(task, "jit_multi", batch, Practices(shard_state=True))
    with pytest.raises(ValueError, match=r"Practices.compute must be one of float32, bfloat16, got 'float16'"):
        Practices(compute="float16")
