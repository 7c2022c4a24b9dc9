"""Three modes: the same loss as in NumPy, equal steps, and what is refused."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mlp_tasks import made_up_rows, placed, program_of, task_of

from feedline._src.trainer.model import Sizes
from feedline._src.trainer.modes import Mode, compiled, mesh_for
from feedline._src.trainer.task import Task

SIZES = Sizes(features=64, classes=10, width=32)
MODES = get_args(Mode)


PADDED = [{**made_up_rows(64, seed=k), "valid": np.arange(64) % (k + 2) > 0} for k in range(6)]


def losses_of(mode):
    """The losses of steps on padded batches, the first step's accuracy, and the parameters before and after."""
    program, seen = program_of(mode, SIZES, padded=True), []
    state = program.start()
    start = jax.device_get(state.params)
    for batch in PADDED:
        state, metrics = program.step(state, placed(batch, mode))
        seen.append(np.array(metrics))
    return np.array(seen)[:, 0], seen[0][1], start, jax.device_get(state.params)


def test_the_loss_and_the_accuracy_are_those_of_numpy():
    losses, accuracy, params, _ = losses_of("jit_single")
    signal = PADDED[0]["image"].reshape(64, -1) / 255
    for layer in (*(params["hidden"][i] for i in range(2)), params["scores"]):
        scores = signal @ np.asarray(layer["kernel"][...]) + np.asarray(layer["bias"][...])
        # GELU in its form with tanh (Hendrycks and Gimpel 2016)
        signal = scores * (1 + np.tanh(np.sqrt(2 / np.pi) * (scores + 0.044715 * scores**3))) / 2
    label, valid = PADDED[0]["label"], PADDED[0]["valid"]
    rows = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(64), label]
    assert losses[0] == pytest.approx(rows[valid].mean(), rel=1e-5)
    assert accuracy == pytest.approx((scores.argmax(axis=1) == label)[valid].mean(), rel=1e-6)


@pytest.mark.parametrize("mode", ["jit_multi", pytest.param("pmap", marks=pytest.mark.slow)])
def test_every_mode_takes_the_same_steps_on_padded_batches(mode):
    (losses, _, _, params), (wanted, _, _, wanted_params) = losses_of(mode), losses_of("jit_single")
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), params, wanted_params)


def test_a_batch_without_a_valid_row_has_no_gradient():
    descent = task_of(SIZES, optax.sgd(1.0))
    before = jax.jit(descent.start)()
    after, metrics = jax.jit(descent.update)(before, {**made_up_rows(8), "valid": np.zeros(8, bool)})
    assert float(metrics[0]) == 0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before.params, after.params))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_transfers_nothing_and_keeps_the_state_replicated(mode):
    program, batch = program_of(mode, SIZES), placed(made_up_rows(64), mode)
    before = program.start()
    alone = program_of("jit_single", SIZES).start()
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (before.params, alone.params)))
    with jax.transfer_guard("disallow_explicit"):
        after, metrics = program.step(before, batch)
        program.measure(after.params, batch)
    devices = set(mesh_for(mode).devices.flat)
    assert len(devices) == (1 if mode == "jit_single" else 8)
    for leaf in [metrics, *jax.tree.leaves(after)]:
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == devices
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))


def test_pmap_weighs_the_devices_by_their_valid_rows():
    """Some devices have no valid row, so their mean and gradient are NaN; these must not count."""

    def loss(params, batch):
        rows = batch["valid"].sum()
        return jnp.where(batch["valid"], params["w"] * batch["x"], 0).sum() / rows, {"rows": rows}

    task = Task(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(1.0))
    batch = {"x": np.arange(16, dtype=np.float32), "valid": np.arange(16) < 3}
    program = compiled(task, "pmap", batch := placed(batch, "pmap"))
    state, metrics = program.step(program.start(), batch)
    assert metrics.tolist() == [1.0, pytest.approx((2 * 2 + 1 * 1) / 3)]  # x: 0, 1, 2; rows by device: 2, 1
    assert float(state.params["w"]) == 0.0


def mean_task():
    return Task(lambda key: {"w": jnp.ones(())}, lambda p, b: (jnp.mean(p["w"] * b["x"]), {}), optax.sgd(1.0))


@pytest.mark.parametrize("spec", [P(("a", "b")), P(("b", "a")), P("a"), P("a", "b"), P()])
def test_pmap_takes_rows_that_are_split_in_any_way(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    batch = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
    program = compiled(mean_task(), "pmap", batch)
    before = program.start().step.sharding  # if a step changed it, the next would compile again
    with jax.transfer_guard("disallow"):
        state, metrics = program.step(program.start(), batch)
    assert float(metrics[0]) == x.mean()
    assert state.step.sharding == before


def test_refused_modes(monkeypatch):
    def spec_of(rows):
        sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), P("a"))
        return {"x": jax.ShapeDtypeStruct((rows, 8), np.float32, sharding=sharding)}

    with pytest.raises(ValueError, match=r'one device, but the batches lie on 8; give the feed mesh_for\("jit_si'):
        compiled(mean_task(), "jit_single", spec_of(16))
    with pytest.raises(ValueError, match="8 devices the same number of rows, and a batch has 12; use a batch"):
        compiled(mean_task(), "pmap", spec_of(12))
    with pytest.raises(ValueError, match="one of jit_single, jit_multi, pmap, got 'jit'"):
        mesh_for("jit")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match='has 4 processes; use mode "jit_multi" or "pmap"'):
        mesh_for("jit_single")


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (jnp.zeros(()), r"it returned float32\[\]"),
        ((jnp.zeros(()), jnp.zeros(())), r"it returned \('float32\[\]', 'float32\[\]'\)"),
        ((jnp.zeros(4), {}), r"\('float32\[4\]', {}\)"),
        ((jnp.zeros((), jnp.int32), {}), r"\('int32\[\]', {}\)"),
        ((jnp.zeros(()), {"accuracy": jnp.zeros(4)}), r"{'accuracy': 'float32\[4\]'}"),
        ((jnp.zeros(()), {"a": {"b": jnp.zeros(())}}), r"{'a': {'b': 'float32\[\]'}}"),
        *(((jnp.zeros(()), {name: 0.0}), rf"{{{name!r}: 'float'}}") for name in ("loss", "step", "eval_x", 1)),
        ((jnp.zeros(()), {"wait_share": 0.0}), "other than loss, step, rows_per_s, wait_share and eval_…; it"),
    ],
)
def test_refused_losses(result, told):
    task = Task(lambda key: {"w": jnp.zeros(())}, lambda params, batch: result, optax.sgd(1.0))
    with pytest.raises(TypeError, match=told):
        task.update(task.start(), {"x": jnp.zeros(4)})


@pytest.mark.parametrize("optimizer", [optax.inject_hyperparams(optax.adam)(1e-2), optax.adafactor(1e-2)])
def test_a_state_keeps_its_dtypes_so_that_a_resume_finds_them(optimizer):
    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": 0.5}  # adam alone makes b's float32
    task = Task(
        lambda key: params, lambda params, x: (sum(jnp.sum(leaf * x) for leaf in params.values()), {}), optimizer
    )
    start = jax.eval_shape(task.start)
    assert jax.eval_shape(task.update, start, jnp.ones(1))[0] == start
