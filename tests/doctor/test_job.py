"""The doctor observes commands: it finds each trouble that is planted in a script, and none in a sound script."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import programs
import pytest

from feedline._src.tools.doctor import job
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
import functools, random
import feedline

random.seed(0)

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
assert random.random() == random.Random(0).random()  # nobody else draws from the job's generator
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
    time.sleep(0.01)  # the step of a larger model
"""
WAITS = """
import feedline

def slow(batch, rows):
    time.sleep(0.02)
    return batch

@jax.jit
def step(state, batch):
    y = jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ state), batch["x"])
    return state * 0.99, y.mean()

one = jax.devices()[0]
state, large = jax.device_put(state, one), np.ones(2 << 20)  # cast to float32 by the training thread
feed = feedline.Feed({"x": rows}, 64, one, transform=slow, prefetch=0)
for i, batch in zip(range(30), feed):  # LINE: next
    state, loss = step(state, batch)
    float(loss)  # LINE: float
    jnp.array(large)  # LINE: place
"""
OTHERS = """
step = jax.jit(lambda state, batch, metadata: state * batch["x"].mean())
for i in range(20):
    batch = jax.device_put({"x": np.full((512, 64), i % 256, np.float32)}, replicated)  # LINE: put
    small = [jax.device_put(np.full(4, i + k, np.float32), replicated) for k in range(20)]
    state = step(state, batch, small)
    jax.jit(lambda x: 2 * x)(state)  # LINE: double
    jnp.ones(i + 3).sum()  # LINE: eager
"""
SAMPLED = {"transfers to the host", "transfers to the devices", "waiting for input", "GIL"}
"""Checks that measure times: while other programs keep the machine busy, they may warn of a sound job."""


def observed(tmp_path, script, **environ):
    """Observe a script. Returns {check: what it found}, a function from a mark to its line, and the run."""
    text = textwrap.dedent(HEAD + textwrap.dedent(script))
    (tmp_path / "train.py").write_text(text)
    wanted = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ran = job.run([sys.executable, str(tmp_path / "train.py")], {**os.environ, **wanted, **environ}, 240)
    found = {check.name: check for check in job.job_findings(ran)}

    def line(mark):
        numbers = [i for i, each in enumerate(text.splitlines(), 1) if mark in each.partition("# LINE:")[2]]
        return f"train.py:{numbers[0]}"

    return found, line, ran


def warning(found, name):
    assert found[name].severity == "warning", found[name]
    return found[name].finding


def test_a_sound_job_has_no_troubles(tmp_path):
    found, *_ = observed(tmp_path, SOUND)
    assert found.keys() >= {*SAMPLED, "memory that grows", "sharding of the batch"}
    assert [check for name, check in found.items() if check.severity != "ok" and name not in SAMPLED] == []


def test_shapes_kept_arrays_an_unrolled_loop_and_a_busy_thread(tmp_path):
    found, line, ran = observed(tmp_path, MANY)
    passed = warning(found, "transfers to the devices")
    assert passed.endswith(") gets NumPy arrays, 61 KiB in each call")  # of the 61 rows of call 3
    recompilation = warning(found, "recompilation")
    assert f"/{line('numpy')}: compiled again 3 × " in recompilation
    assert "argument 1['x']: float32[64, 256] of NumPy → float32[63, 256] of NumPy" in recompilation
    assert "256 KiB from step" in warning(found, "donation")
    assert "holds 20 equal iterations of 3 operations" in warning(found, "unrolled loops")
    assert "arrays float32[256, 256]" in warning(found, "memory that grows")
    assert "GIL" in found  # test_the_gil tests the severity, which here depends on other programs
    assert "hog" in {thread["name"] for thread in ran.processes[0]["samples"]["threads"]}


def test_lines_that_wait_are_sampled(tmp_path):
    found, line, _ = observed(tmp_path, WAITS)
    assert f"{line('next')} for i, batch in zip(range(30), feed): (" in warning(found, "waiting for input")
    assert f"{line('float')} float(loss) (" in warning(found, "transfers to the host")
    assert f"{line('place')} jnp.array(large) (" in warning(found, "transfers to the devices")


def test_replicated_wide_and_many_leaves_and_functions_made_in_the_loop(tmp_path):
    found, line, _ = observed(tmp_path, OTHERS)
    replicated = warning(found, "sharding of the batch")
    assert "argument 1['x'] float32[512, 64] on each of 4 devices" in replicated
    assert "argument 1['x'] is float32 and fits uint8" in warning(found, "dtypes of the batch")
    assert "20 of 21 leaves" in found["number of leaves"].finding
    again = warning(found, "recompilation")
    assert f"/{line('double')}: compiled again 19 × " in again
    assert "no argument had changed: jax.jit was called again" in again
    assert f"/{line('eager')}: compiled again 18 × " in again
    assert found["memory that grows"].severity == "unknown"  # 20 steps are too few


def test_a_program_that_was_compiled_ahead_is_observed(tmp_path):
    ahead = """
    batch = jax.device_put(rows, sharded)
    lowered = jax.jit(lambda state, batch: (state * 0.9, batch.sum())).lower(state, batch)
    step = lowered.compile()
    for i in range(20):
        state, loss = step(state, jax.device_put(rows + i, sharded))
    assert isinstance(step, jax.stages.Compiled) and isinstance(lowered, jax.stages.Lowered)
    assert step.cost_analysis() is not None and "stablehlo" in lowered.as_text()
    assert step.as_text()
    """
    found, *_ = observed(tmp_path, ahead)
    assert found["the command"].severity == "ok"
    assert "256 KiB from " in warning(found, "donation")


def test_wrapped_functions_behave_like_plain_ones(tmp_path):
    usual = """
    import copy, inspect, pickle, cloudpickle, jax.export
    class Model:
        @jax.jit
        def twice(x): return 2 * x
        @__import__("functools").partial(jax.jit, static_argnums=0)
        def scaled(self, x, *, by): return x * by
        def __hash__(self): return 1
        def __eq__(self, other): return True

    traced = []
    @jax.jit(static_argnames="n")
    def power(x, n: int = 2):
        traced.append(n)
        return x ** n

    plain, three = power._watched_original, jnp.float32(3)
    assert (power.__name__, power.__module__, power.__annotations__) == ("power", "__main__", {"n": int})
    assert list(inspect.signature(power).parameters) == ["x", "n"] and inspect.unwrap(power) is plain.__wrapped__
    assert isinstance(power, type(plain)) and isinstance(power, jax.stages.Wrapped) and repr(power) == repr(plain)
    assert float(power(three, n=2)) == float(power(three, n=2)) == 9 and traced == [2]
    assert float(Model().scaled(three, by=2)) == 6 and Model.twice(jnp.float32(1)) == 2
    assert jax.grad(lambda x: power(x, n=3))(2.0) == 12 and jax.grad(power)(3.0) == 6
    assert jax.vmap(lambda x: power(x, n=2))(jnp.arange(3.0)).tolist() == [0, 1, 4]
    assert power.trace(three, n=2).lower().compile()(three) == power.lower(three, n=2).compile()(three) == 9
    assert power.eval_shape(three).shape == () and jax.jit(power)(3.0) == 9 and jax.make_jaxpr(power)(3.0).eqns
    from jax.experimental.serialize_executable import deserialize_and_load, serialize
    again = deserialize_and_load(*serialize(jax.jit(lambda x: x + 1).lower(state).compile()))
    assert jax.export.export(power)(three).call(three) == 9 and float(again(state)[0, 0]) == 2
    for made in (copy.copy(power), copy.deepcopy(power), pickle.loads(cloudpickle.dumps(power))):
        assert made(three, n=2) == 9 and type(made) is type(plain)
    assert jax.pmap(fun=lambda x: x + 1, axis_name="i")(np.ones((1, 2)))[0].tolist() == [2, 2]
    mapped = jax.pmap(lambda x: x + 1)
    assert copy.deepcopy(mapped) is mapped and inspect.isfunction(mapped) and inspect.signature(mapped)
    power.note = "mine"
    assert power.note == "mine" and {power: 1}[power] == 1 and not hasattr(power, "none")
    with jax.disable_jit():
        count = len(traced)
        for _ in range(3):
            power(three)
        assert len(traced) == count + 3
    """
    found, *_ = observed(tmp_path, usual, PYTHONWARNINGS="error")
    assert found["the command"].severity == "ok"
    assert not [check for name, check in found.items() if name.startswith("hook")]


def test_hooks_that_fail_do_not_change_the_job(tmp_path):
    script = """
    from feedline._src.tools.doctor import observe, sampling

    reached = set()

    def broken(*args, **kwargs):
        reached.add(threading.current_thread().name)
        raise ArithmeticError("a fault of the doctor")

    early, step = jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 1)
    for i in range(9):
        state = early(state)
        if i == 3:
            sampling.shown = broken  # in the listener and the sampler
        small = jnp.ones(i + 3).sum()
        float(small), jax.device_put(rows)
        time.sleep(0.05)
    while "feedline doctor" not in reached:
        time.sleep(0.01)
    observe._named = observe.unrolled = observe.Record.begin_loop = broken
    x = step(step(step(step(jnp.zeros(3)))))
    observe.Function.__init__ = observe.user_line = broken
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(x).tolist() == [5, 5, 5]
    """
    found, *_ = observed(tmp_path, script)
    assert found["the command"].severity == "ok"
    for name in ("arguments", "sampling", "compilations"):
        assert "a fault of the doctor" in found[f"hook for {name}"].finding


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(9)"])
def test_what_a_process_saw_before_it_ends_at_once(tmp_path, end):
    killed = f"""
    import os, pathlib
    folder = pathlib.Path(os.environ["PYTHONPATH"].partition(":")[0])
    step = jax.jit(lambda x: x + 1)
    while not list(folder.glob("*.json")):
        state = step(state)
    {end}
    """
    found, *_ = observed(tmp_path, killed)
    assert found["the command"].finding in ("it ended with exit code 9", "it ended with exit code 137")
    assert found["donation"].severity == "warning"


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
    assert checks["the command"]["finding"] == "it ended with exit code 7"
    assert checks["donation"]["severity"] == "ok"


@pytest.mark.parametrize(
    ("script", "grace_s"),
    [
        ("sleep 600 > pipe; true", 200),  # the shell ends once its child has ended
        ("PYTHONPATH=mine sleep 600 > pipe & wait", 200),  # the child ignores SIGINT, and outlives the shell
        ("trap '' INT TERM; sleep 600 > pipe; true", 1),
    ],
)
def test_what_a_shell_has_started_ends_with_it(script, grace_s, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "_GRACE_S", grace_s)
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.close(os.open("pipe", os.O_WRONLY))  # from now on, reading ends once no process has it open
    began = time.monotonic()
    ran = job.run(["sh", "-c", script], os.environ, 1)
    assert next(job.job_findings(ran)).finding == "it was stopped before its end"
    assert time.monotonic() - began < 100
    assert select.select([reader], [], [], 100)[0]
    assert os.read(reader, 1) == b""  # the end: no process has the pipe open
    os.close(reader)


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


@pytest.mark.parametrize("command", [["true"], [sys.executable, "-I", "-c", "import jax"]])
def test_a_command_that_cannot_be_observed(command):
    found = {check.name: check for check in job.job_findings(job.run(command, os.environ, None))}
    assert found["the command"].severity == "ok"
    assert found["the job"].severity == "unknown"
    assert "no process imported jax through PYTHONPATH" in found["the job"].finding


def test_a_python_that_cannot_import_feedline_is_named(tmp_path):
    (tmp_path / "feedline.py").write_text("raise ImportError('broken')")
    (tmp_path / "main.py").write_text("import jax")
    ran = job.run([sys.executable, str(tmp_path / "main.py")], os.environ)
    assert ran.code == 0
    assert ran.reason == f"the doctor failed in {sys.executable}: ImportError: broken"


def test_jax_is_the_real_one_also_in_a_process_that_another_one_spawns(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import importlib.util, multiprocessing, sys
        assert importlib.util.find_spec("jax") and "jax" not in sys.modules
        import jax.numpy as jnp
        import jax

        def count():
            jax.jit(lambda x: x + 1)(jnp.ones(3))

        if __name__ == "__main__":
            count()
            assert jax.__path__ and importlib.util.find_spec("jax").origin == jax.__file__
            child = multiprocessing.get_context("spawn").Process(target=count)
            child.start()
            child.join()
            assert child.exitcode == 0
        """)
    )
    ran = job.run([sys.executable, str(script)], {**os.environ, "JAX_PLATFORMS": "cpu"}, None)
    assert ran.code == 0
    assert [len(process["functions"]) for process in ran.processes] == [1, 1]


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


def test_the_example_shows_what_its_page_says():
    root = Path(__file__).parents[2]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    ran = job.run([sys.executable, str(root / "examples" / "slow_training.py")], environ, 240)
    found = {check.name: check for check in job.job_findings(ran)}
    for name in ("donation", "unrolled loops", "memory that grows", "sharding of the batch"):
        warning(found, name)
    assert "fits uint8" in warning(found, "dtypes of the batch")
    assert found["recompilation"].severity == "note"
    assert "slow_training.py:41 losses.append(float(loss)) (" in warning(found, "transfers to the host")
    assert "slow_training.py:39 image = jax.device_put(" in warning(found, "transfers to the devices")
    page = (root / "docs" / "tools.md").read_text()
    assert not [name for name in found if name not in page]  # each check is in the tables
