"""The three modes: same batches, same losses, same state, and nothing that passes through the host."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mlp_oracle import adam, made_up_rows, weights_of
from mlp_tasks import placed, program_of

from feedline._src.tools.launch.environments import reserved_port
from feedline._src.trainer.model import Sizes
from feedline._src.trainer.modes import Mode, compiled, mesh_for
from feedline._src.trainer.task import Task

SIZES = Sizes(features=64, classes=10, width=32)
MODES = get_args(Mode)
BATCHES = [made_up_rows(64, seed=k) for k in range(6)]


def losses_of(mode, batches):
    """The loss of each step, and the last state."""
    program = program_of(mode, SIZES, padded="valid" in batches[0])
    state, seen = program.start(), []
    for batch in batches:
        state, metrics = program.step(state, placed(batch, mode))
        seen.append(float(metrics[0]))
    return seen, state


@pytest.mark.parametrize("mode", ["jit_single", "jit_multi", pytest.param("pmap", marks=pytest.mark.slow)])
def test_every_mode_follows_the_oracle(mode):
    seen, state = losses_of(mode, BATCHES)
    start = weights_of(program_of(mode, SIZES).start().params)
    expected_weights, expected = adam(start, BATCHES, 3e-3)
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    for found, wanted in zip(weights_of(state.params), expected_weights, strict=True):
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "mode", ["jit_multi", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("jit_single", "pmap"))]
)
def test_the_state_stays_replicated_and_the_old_one_is_donated(mode):
    program = program_of(mode, SIZES)
    before = program.start()
    after, metrics = program.step(before, placed(BATCHES[0], mode))
    devices = set(mesh_for(mode).devices.flat)
    assert len(devices) == (1 if mode == "jit_single" else 8)
    for leaf in [metrics, *jax.tree.leaves(after)]:
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == devices
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))


@pytest.mark.parametrize("mode", MODES)
def test_first_weights_are_the_same_bits_in_all_modes(mode):
    for a, b in zip(*(weights_of(program_of(m, SIZES).start().params) for m in (mode, "jit_single")), strict=True):
        np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_transfers_nothing_between_host_and_devices(mode):
    program = program_of(mode, SIZES)
    state = program.start()
    batches = [placed(batch, mode) for batch in BATCHES]
    with jax.transfer_guard("disallow_explicit"):
        for batch in batches:
            state, metrics = program.step(state, batch)
        program.measure(state.params, batches[0])
    assert np.isfinite(metrics).all()


def test_pmap_weighs_the_devices_by_their_valid_rows():
    """Also where a device has no valid row, and its mean and gradient are NaN."""

    def loss(params, batch):
        rows = batch["valid"].sum()
        return jnp.where(batch["valid"], params["w"] * batch["x"], 0).sum() / rows, {"rows": rows}

    task = Task(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(1.0))
    batch = {"x": np.arange(16, dtype=np.float32), "valid": np.arange(16) < 3}
    program = compiled(task, "pmap", batch := placed(batch, "pmap"))
    state, metrics = program.step(program.start(), batch)
    assert metrics.tolist() == [1.0, pytest.approx((2 * 2 + 1 * 1) / 3)]  # of 0, 1 and 2; 2 rows and 1 row
    assert float(state.params["w"]) == 0.0


def spec_of(shape, sharding):
    return {"x": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}


def mean_task():
    return Task(lambda key: {"w": jnp.ones(())}, lambda p, b: (jnp.mean(p["w"] * b["x"]), {}), optax.sgd(1.0))


@pytest.mark.parametrize("mode", MODES)
def test_batches_on_a_bare_device(mode):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    program = compiled(mean_task(), mode, batch := {"x": jax.device_put(np.ones(4, np.float32), one)})
    state, _ = program.step(program.start(), batch)
    assert float(state.params["w"]) == 0.0
    assert state.step.sharding.device_set == {jax.devices()[3]}


@pytest.mark.parametrize("spec", [P(("a", "b")), P(("b", "a")), P("a"), P("a", "b"), P()])
def test_pmap_takes_rows_that_are_split_in_any_way(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    batch = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
    program = compiled(mean_task(), "pmap", batch)
    with jax.transfer_guard("disallow"):
        _, metrics = program.step(program.start(), batch)
    assert float(metrics[0]) == x.mean()


def test_batches_that_do_not_fit_a_mode():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    sharding = NamedSharding(mesh, P("a"))
    told = r'one device, but the batches lie on 8; give the feed mesh_for\("jit_single"\)'
    with pytest.raises(ValueError, match=told):
        compiled(mean_task(), "jit_single", spec_of((16, 8), sharding))
    with pytest.raises(ValueError, match="each of 8 devices as many rows, and a batch has 12; take a batch size"):
        compiled(mean_task(), "pmap", spec_of((12, 8), sharding))


def test_meshes_have_auto_axes():
    assert [mesh_for(mode).size for mode in MODES] == [1, 8, 8]
    assert all(kind == jax.sharding.AxisType.Auto for mode in MODES for kind in mesh_for(mode).axis_types)


def test_refused_modes(monkeypatch):
    with pytest.raises(ValueError, match="one of jit_single, jit_multi, pmap, got 'jit'"):
        mesh_for("jit")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match='has 4 processes; use mode "jit_multi" or "pmap"'):
        mesh_for("jit_single")


@pytest.mark.slow
def test_two_processes_reach_the_losses_of_one():
    worker = Path(__file__).with_name("two_processes.py")
    with contextlib.ExitStack() as stack:
        command = [sys.executable, worker, f"127.0.0.1:{stack.enter_context(reserved_port())}"]
        options = {"stdout": subprocess.PIPE, "text": True, "env": programs.importing()}
        each = [programs.started([*command, str(i)], **options) for i in range(2)]
        started = [stack.enter_context(process) for process in each]
        results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert results[0] == results[1]
    expected = losses_of("jit_single", BATCHES)[0]
    for mode in ("jit_multi", "pmap"):
        np.testing.assert_allclose(results[0][mode], expected, rtol=1e-5)
    assert results[0]["evaluated"] == [[64, *results[0]["evaluated"][0][1:]]] * 2
    assert 'use mode "jit_multi" or "pmap"' in results[0]["jit_single"]
