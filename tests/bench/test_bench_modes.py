"""`feedline bench modes` and `practices`: equal losses, and the memory of each mode and practice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import programs
import pytest

from feedline._src.tools.bench import modes, practices
from feedline._src.tools.bench.machine import KILLED, in_a_process
from feedline._src.tools.bench.workload import Workload
from feedline._src.trainer.modes import compiled

SHORT = Path(__file__).parent / "short_preset.py"
TINY = Workload(depth=3, width=32, inputs=16, outputs=4, rows=64)


@pytest.mark.slow
def test_the_modes_have_the_same_losses_and_only_jit_single_needs_more_memory():
    found = {mode: modes.batch_figures(TINY, mode, 0.01) for mode in modes.MODES}
    for figures in found.values():
        assert len(figures["losses"]) == 10
        np.testing.assert_allclose(figures["losses"], found["jit_single"]["losses"], rtol=1e-5)
        assert figures["losses"][-1] < figures["losses"][0]
        assert (
            min(figures[name] for name in ("step_ms", "fed_step_ms", "rows_per_s", "of_matmul", "compile_s")) > 0
        )
        assert figures["peak_bytes"] is None  # CPU devices do not report it
    total = {mode: figures["compiled_bytes"]["total"] for mode, figures in found.items()}
    assert total["jit_single"] > total["jit_multi"] == pytest.approx(total["pmap"], rel=0.05)


def test_flops_are_those_that_the_compiler_counts():
    workload = Workload(depth=3, width=128, inputs=64, outputs=16, rows=512)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = {
        name: jax.ShapeDtypeStruct((512, width), np.float32, sharding=sharding)
        for name, width in (("x", 64), ("y", 16))
    }
    counted = compiled(workload.task(), "jit_single", spec).compile()[1].cost_analysis()["flops"]
    assert counted == pytest.approx(workload.flops, rel=0.05)  # it also counts Adam, ReLU, biases


def test_a_mode_that_lacks_memory_is_a_row(monkeypatch):
    def out_of_memory(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    monkeypatch.setattr(modes, "_times", out_of_memory)
    found = modes.batch_figures(TINY, "pmap", 0.01)
    assert "step_ms" not in found
    needs = f"a step needs {found['compiled_bytes']['total'] / 2**20:,.0f} MiB, says the compiler"
    line = modes.line("pmap", found)
    assert line == f"pmap             64  ran out of memory: {needs}"


def killed(number):
    os.kill(os.getpid(), number)


@pytest.mark.slow
def test_a_process_that_is_killed_is_a_row():
    found = in_a_process(killed, signal.SIGKILL)
    assert found == {"error": KILLED}
    merged = modes._merged([found, {"step_ms": 1.0}])
    assert modes.line("jit_multi", merged) == f"jit_multi   {KILLED}"
    assert modes.remarks({"jit_single": found, "jit_multi": found, "pmap": found}) == []


WAITING = """
from feedline._src.tools.bench.machine import in_a_process
if __name__ == "__main__":
    in_a_process(exec, "print('here', flush=True); import time; time.sleep(1000)")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_called_it(number, tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, tmp_path / "waiting.py"]
    with programs.started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as caller:
        assert caller.stdout.readline() == b"here\n"
        caller.send_signal(number)
        caller.communicate(timeout=60)  # returns when both processes have ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "less"),
    [
        ("donate_state", "off", "on"),
        ("shard_state", "off", "on"),
        ("ship_uint8", "off", "on"),
        ("steps_per_call", "on", "off"),
    ],
)
def test_the_compiler_sees_the_difference_in_memory(name, more, less):
    found = practices.measured(practices.pairs(TINY)[name], 2, 0.01)
    for which in ("on", "off"):
        figures = found[which]
        assert figures["step_ms"] > 0
        assert len(figures["step_ms_samples"]) == 2
    assert found["ratios"] == sorted(found["ratios"])
    assert found[more]["compiled_bytes"]["total"] > found[less]["compiled_bytes"]["total"]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rows"), [("modes", modes.MODES), ("practices", tuple(practices.pairs(TINY)))])
def test_the_command_prints_the_table_and_one_object(what, rows, tmp_path):
    options = ["--seconds", "0.02", "--rounds", "1", "--cpu-devices", "2", "--json"]
    done = programs.run(
        [sys.executable, "-W", "error", SHORT, "bench", what, *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[what]
    assert tuple(found) == rows
    assert not [name for name in rows if f"\n{name} " not in done.stdout]
    for figures in found.values():
        if what == "modes":
            assert {"step_ms", "fed_step_ms", "rows_per_s", "peak_bytes", "compile_s", "losses"} <= set(figures)
            assert figures["doubled"]["rows"] == 2 * figures["rows"]
        else:
            assert {"step_ms", "compiled_bytes"} <= set(figures["on"]) & set(figures["off"])
    assert list(tmp_path.iterdir()) == []  # no checkpoint is left behind
