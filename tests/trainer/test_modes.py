"""The three modes: same batches, same losses, same state, and nothing that passes through the host."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from mlp_oracle import adam, made_up_rows, weights_of

from feedline.cluster.launch import _reserved_port
from feedline.trainer.learner import Learner
from feedline.trainer.model import MLP, Sizes
from feedline.trainer.modes import Mode, compiled, mesh_for

SIZES = Sizes(features=64, classes=10, width=32)
MODES = get_args(Mode)
BATCHES = [made_up_rows(64, seed=k) for k in range(6)]


@functools.cache
def program_of(mode):
    return compiled(Learner(lambda: MLP(SIZES, rngs=nnx.Rngs(0)), optax.adam(3e-3)), mode)


def losses_of(mode, batches):
    program, seen = program_of(mode), []
    state = program.init()
    for batch in batches:
        state, loss = program.step(state, jax.device_put(batch, program.sharding))
        seen.append(float(loss))
    return seen, state


@pytest.mark.parametrize("mode", ["jit_single", "jit_multi", pytest.param("pmap", marks=pytest.mark.slow)])
def test_every_mode_follows_the_oracle(mode):
    seen, state = losses_of(mode, BATCHES)
    start = weights_of(program_of(mode).init().parameters)
    expected_weights, expected = adam(start, BATCHES, 3e-3)
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    for found, wanted in zip(weights_of(state.parameters), expected_weights, strict=True):
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_padding_that_falls_on_some_devices_only_weighs_nothing(mode):
    padded = [{**batch, "valid": np.arange(64) < 37} for batch in BATCHES]
    few = [{name: leaf[:37] for name, leaf in batch.items()} for batch in BATCHES]
    start = weights_of(program_of(mode).init().parameters)
    np.testing.assert_allclose(losses_of(mode, padded)[0], adam(start, few, 3e-3)[1], rtol=1e-5)


@pytest.mark.parametrize(
    "mode", ["jit_multi", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("jit_single", "pmap"))]
)
def test_the_state_stays_replicated_and_the_old_one_is_donated(mode):
    program = program_of(mode)
    before = program.init()
    after, loss = program.step(before, jax.device_put(BATCHES[0], program.sharding))
    devices = set(program.sharding.mesh.devices.flat)
    assert len(devices) == (1 if mode == "jit_single" else 8)
    for leaf in [loss, *jax.tree.leaves(after)]:
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == devices
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.parameters))


@pytest.mark.parametrize("mode", MODES)
def test_first_weights_are_the_same_bits_in_all_modes(mode):
    for a, b in zip(*(weights_of(program_of(m).init().parameters) for m in (mode, "jit_single")), strict=True):
        np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_step_transfers_nothing_between_host_and_devices(mode):
    program = program_of(mode)
    state = program.init()
    batches = [jax.device_put(batch, program.sharding) for batch in BATCHES]
    with jax.transfer_guard("disallow_explicit"):
        for batch in batches:
            state, loss = program.step(state, batch)
        program.sums(state.parameters, batches[0])
    assert np.isfinite(loss)


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
    with _reserved_port() as port:
        command = [sys.executable, worker, f"127.0.0.1:{port}"]
        started = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
        results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert results[0] == results[1]
    expected = losses_of("jit_single", BATCHES)[0]
    for mode in ("jit_multi", "pmap"):
        np.testing.assert_allclose(results[0][mode], expected, rtol=1e-5)
    assert results[0]["evaluated"] == [[64, *results[0]["evaluated"][0][1:]]] * 2
    assert 'use mode "jit_multi" or "pmap"' in results[0]["jit_single"]
