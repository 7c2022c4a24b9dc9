"""Commands that are observed: each trouble is planted in a script, and a sound script has none."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import programs
import pytest

from feedline._src.tools.doctor import job
from feedline._src.tools.doctor.job_checks import command_checks
from feedline._src.tools.main import main

pytestmark = pytest.mark.slow

HEAD = """
import threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
rows = np.random.default_rng(0).random((64, 256)).astype(np.float32)
state = jax.device_put(np.ones((256, 256), np.float32), replicated)
"""
SOUND = """
import functools
import feedline

@functools.partial(jax.jit, donate_argnums=0)
def step(state, batch):
    y = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ state), batch["x"])
    return state * 0.99, y.mean()

loss = None
for i, batch in zip(range(80), feedline.prefetch_to_mesh(({"x": rows} for _ in range(90)), sharded)):
    if i % 40 == 39:
        print("loss", float(loss))
    state, loss = step(state, batch)
    time.sleep(0.01)  # the step of a larger model
"""
MANY = """
@jax.jit
def step(state, batch, scale=1.0):
    x = batch["x"]
    for _ in range(20):
        x = jnp.tanh(x @ state) + x
    return state * 0.999, x.mean()

def hog():
    while True:
        sum(range(1000))

threading.Thread(target=hog, name="hog", daemon=True).start()
kept = []
for i in range(100):
    state, loss = step(state, {"x": rows[: 64 - i % 4]})  # LINE: numpy, shapes
    kept.append(state)
    if float(loss) == -1.0:  # LINE: float
        break
"""
OTHERS = """
step = jax.jit(lambda state, batch, metadata: state * batch["x"].mean())
for i in range(20):
    batch = jax.device_put({"x": np.full((512, 64), i % 256, np.float32)}, replicated)  # LINE: device_put
    small = [jax.device_put(np.full(4, i + k, np.float32), replicated) for k in range(20)]
    state = step(state, batch, small)
    double = jax.jit(lambda x: 2 * x)  # LINE: jit
    double(state)
    jnp.ones(i + 3).sum()  # LINE: eager
    jax.block_until_ready(state)  # LINE: wait
jax.pmap(lambda x: x + 1)(np.ones((4, 2), np.float32))  # LINE: pmap
"""


def observed(tmp_path, script, **environ):
    """The checks of a command by name, and a function for the line with a mark."""
    text = textwrap.dedent(HEAD + script)
    (tmp_path / "train.py").write_text(text)
    wanted = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ran = job.run([sys.executable, str(tmp_path / "train.py")], {**os.environ, **wanted, **environ}, 60)
    found = {check.name: check for check in command_checks(ran)}

    def line(mark):
        numbers = [i for i, each in enumerate(text.splitlines(), 1) if mark in each.partition("# LINE:")[2]]
        return f"train.py:{numbers[0]}"

    return found, line


def test_a_sound_job(tmp_path):
    found, _ = observed(tmp_path, SOUND)
    assert "interpreter's lock" in found  # a machine that is busy with other programs may be told there
    troubles = {
        name: check.finding
        for name, check in found.items()
        if check.severity != "ok" and name != "interpreter's lock"
    }
    assert troubles == {"fragmentation of device memory": "no device reported its free blocks"}
    assert "memory that grows" in found
    assert "sharding of the batch" in found


def test_transfers_shapes_kept_arrays_an_unrolled_loop_and_a_busy_thread(tmp_path):
    found, line = observed(tmp_path, MANY)

    def finding(name):
        assert found[name].severity == "warning", found[name]
        return found[name].finding

    waits = found["transfers to the host"]  # how long it waits beside the busy thread differs from run to run
    assert waits.severity in ("warning", "note")
    assert f"{line('float')} float() 100 times, 400 B" in waits.finding
    assert f"{line('numpy')} step() of NumPy arrays 100 times, 6.1 MiB" in finding("transfers to the devices")
    recompilation = finding("recompilation")
    assert "step" in recompilation
    assert "was compiled 3 times more" in recompilation
    assert "argument 1['x']: float32[64, 256] of NumPy → float32[63, 256] of NumPy" in recompilation
    assert "got 256 KiB of its results back as arguments" in finding("donation")
    assert "holds 20 equal iterations in a row, of 3 operations" in finding("unrolled loops")
    assert "arrays float32[256, 256]" in finding("memory that grows")
    lock = finding("interpreter's lock")
    assert "thread 'hog' was busy for" in lock


def test_replicated_wide_and_many_leaves_pmap_and_functions_made_in_the_loop(tmp_path):
    found, line = observed(tmp_path, OTHERS)
    assert {name: found[name].severity for name in ("sharding of the batch", "dtypes of the batch")} == {
        "sharding of the batch": "warning",
        "dtypes of the batch": "warning",
    }
    assert "argument 1['x'] float32[512, 64] is replicated on 4 devices" in found["sharding of the batch"].finding
    assert "argument 1['x'] is float32 and fits uint8" in found["dtypes of the batch"].finding
    assert "20 of 21 leaves" in found["number of leaves"].finding
    assert f"{line('device_put')} jax.device_put 20 times" in found["transfers to the devices"].finding
    assert f"{line('wait')} jax.block_until_ready 20 times" in found["transfers to the host"].finding
    assert line("pmap") in found["pmap"].finding
    again = found["recompilation"].finding
    assert f"{line('jit')}) was compiled 19 times more" in again
    assert f"{line('eager')} (" in again
    assert "unknown" in found["memory that grows"].severity  # 20 steps are too few


def test_a_program_that_was_compiled_ahead(tmp_path):
    ahead = """
    batch = jax.device_put(rows, sharded)
    step = jax.jit(lambda state, batch: (state * 0.9, batch.sum())).lower(state, batch).compile()
    for i in range(20):
        state, loss = step(state, jax.device_put(rows + i, sharded))
        loss.item()  # LINE: item
        if loss > 1e9: break  # LINE: if
    __import__("os")._exit(0)  # as a program that does not wait for its threads
    """
    found, line = observed(tmp_path, textwrap.dedent(ahead))
    assert "256 KiB of its results" in found["donation"].finding
    assert f"{line('if')} bool() 20 times" in found["transfers to the host"].finding
    assert f"{line('item')} .item() 20 times" in found["transfers to the host"].finding


def test_wrapped_functions_behave_as_usual(tmp_path):
    usual = """
    import inspect
    class Model:
        @jax.jit
        def twice(x): return 2 * x
        @__import__("functools").partial(jax.jit, static_argnums=0)
        def scaled(self, x, *, by): return x * by
        def __hash__(self): return 1
        def __eq__(self, other): return True

    @jax.jit(static_argnames="n")
    def power(x, n):
        '''A docstring.'''
        return x ** n

    assert power.__doc__ == "A docstring." and power.__name__ == "power"
    assert list(inspect.signature(power).parameters) == ["x", "n"]
    assert float(power(jnp.float32(3), n=2)) == 9
    assert float(Model().scaled(jnp.float32(3), by=2)) == 6 and Model.twice(jnp.float32(1)) == 2
    assert jax.grad(lambda x: power(x, n=3))(2.0) == 12
    assert jax.vmap(lambda x: power(x, n=2))(jnp.arange(3.0)).tolist() == [0, 1, 4]
    assert power.lower(jnp.float32(3), n=2).compile()(jnp.float32(3)) == 9
    assert jax.eval_shape(lambda x: power(x, n=2), jnp.float32(1)).shape == ()
    assert np.asarray(jnp.arange(3)).tolist() == [0, 1, 2] and f"{jnp.float32(2):.1f}" == "2.0"
    key = jax.random.key(0)
    for _ in range(4):
        key, sub = jax.jit(jax.random.split)(key)
    jax.block_until_ready(jax.device_get({"a": state}))
    power.clear_cache()
    """
    found, _ = observed(tmp_path, textwrap.dedent(usual), PYTHONWARNINGS="error")
    assert found["the command"].severity == "ok"
    assert not [name for name in found if name.startswith("hook")]


def test_wide_types_under_x64(tmp_path):
    wide = """
    step = jax.jit(lambda batch: batch.sum())
    for i in range(10):
        step(jax.device_put(np.random.random((64, 256)), sharded))
    """
    found, _ = observed(tmp_path, textwrap.dedent(wide), JAX_ENABLE_X64="1")
    assert "argument 0 is float64 and fits float32" in found["dtypes of the batch"].finding


# --- the command line ---


def doctor(*arguments):
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return programs.started(
        [sys.executable, "-m", "feedline", "doctor", *arguments],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_output_and_the_exit_code_of_a_command_are_passed_on():
    with doctor(
        "--json", "--", sys.executable, "-c", "import jax; print('from the job'); raise SystemExit(7)"
    ) as ran:
        out, err = ran.communicate(timeout=120)
    first, *_, last = out.splitlines()
    assert (ran.returncode, first) == (7, "from the job"), err
    checks = {check["name"]: check for check in json.loads(last)["checks"]}
    assert checks["the command"]["severity"] == "error"
    assert checks["the command"]["measured"]["exit_code"] == 7
    assert checks["donation"]["severity"] == "ok"


def test_a_command_that_goes_on_is_ended_after_its_time(tmp_path):
    endless = "import jax; f = jax.jit(lambda x: x + 1); x = f(0)\nwhile True: x = f(x)"
    ran = job.run([sys.executable, "-c", endless], {**os.environ, "JAX_PLATFORMS": "cpu"}, 4)
    assert ran.stopped
    found = {check.name: check for check in command_checks(ran)}
    assert found["the command"].finding == "it was stopped before its end"
    if ran.processes:  # on a busy machine jax is not imported yet
        assert found["interpreter's lock"].severity in ("ok", "unknown")


def test_ctrl_c_ends_the_command_and_shows_what_was_found():
    endless = "import jax, time; jax.jit(lambda x: x + 1)(0); print('running', flush=True); time.sleep(600)"
    with doctor("--", sys.executable, "-c", endless) as ran:
        assert ran.stdout.readline() == "running\n"
        os.killpg(ran.pid, signal.SIGINT)  # as a terminal does
        out, err = ran.communicate(timeout=120)
    assert "the command" in out
    assert ran.returncode in (0, 3, 4), err


def test_sigterm_is_passed_on_to_the_command(tmp_path, monkeypatch):
    """Schedulers, unlike a terminal, may signal the doctor alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    told = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('told')); "
    with doctor("--", sys.executable, "-c", f"{told} print('running', flush=True); time.sleep(600)") as ran:
        assert ran.stdout.readline() == "running\n"
        ran.terminate()
        out, err = ran.communicate(timeout=120)  # returns when the command, too, has ended
    assert (ran.returncode, out, err) == (143, "", "told\nfeedline: terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_jax_is_not_observed():
    found = {check.name: check for check in command_checks(job.run(["true"], os.environ, None))}
    assert found["the job"].severity == "unknown"
    assert "no process of the command imported jax" in found["the job"].finding


def test_a_python_that_cannot_import_feedline_is_named(tmp_path):
    (tmp_path / "feedline.py").write_text("raise ImportError('broken')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = job.run([sys.executable, "-c", "print()"], environ, None)
    assert "cannot import feedline: broken" in ran.reason


def test_a_sitecustomize_of_the_users_runs_too(tmp_path, capfd):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own = 'mine'")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    job.run([sys.executable, "-c", "import sys; print(sys.own)"], environ, None)
    assert capfd.readouterr() == ("mine\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mine:make_feed", "--", "true"], "not both"),
        (["--limit-s", "5"], "--limit-s"),
        (["--data", "/no/such/folder"], "there is no /no/such/folder"),
        (["--", "no-such-command"], "no-such-command"),
    ],
)
def test_wrong_arguments(arguments, told):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert main(["doctor", *arguments]) == 2
    assert told in err.getvalue()
    assert threading.active_count() >= 1


def test_the_example_shows_what_its_page_says():
    root = Path(__file__).parents[2]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    ran = job.run([sys.executable, str(root / "examples" / "slow_training.py")], environ, 100)
    found = {check.name: check for check in command_checks(ran)}
    for name in ("transfers to the devices", "donation", "unrolled loops", "memory that grows"):
        assert found[name].severity == "warning", found[name]
    for name in ("sharding of the batch", "dtypes of the batch"):
        assert found[name].severity == "warning", found[name]
    assert found["recompilation"].severity == "note"
    assert "float() 80 times" in found["transfers to the host"].finding
    page = (root / "docs" / "doctor.md").read_text()
    assert not [name for name in found if name not in page]  # each check is in the tables


def test_a_process_that_is_killed_has_written_before(tmp_path):
    killed = """
    import os, signal
    step = jax.jit(lambda x: x + 1)
    began, x = time.monotonic(), state
    while time.monotonic() < began + 12:
        x = step(x)
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    found, _ = observed(tmp_path, textwrap.dedent(killed))
    assert found["the command"].measured["exit_code"] == 128 + signal.SIGKILL
    assert found["donation"].severity == "warning"
