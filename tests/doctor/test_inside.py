"""What observes a job, by itself: unrolled loops, lines, the record and its failures."""

import json
import os
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from feedline._src.tools.doctor.inside.lines import is_users, user_line
from feedline._src.tools.doctor.inside.probe import busy_seconds, waiting_seconds
from feedline._src.tools.doctor.inside.program import longest_run, unrolled
from feedline._src.tools.doctor.inside.record import Record
from feedline._src.tools.doctor.job_checks import job_checks

X = np.ones((4, 4), np.float32)
HZ = os.sysconf("SC_CLK_TCK")


def program(function, *arguments):
    return unrolled(jax.make_jaxpr(function)(*arguments))


def looped(count):
    def step(x):
        for _ in range(count):
            x = jnp.tanh(x @ x) + jnp.sin(x)
        return x

    return step


def test_an_unrolled_loop():
    found = program(looped(30), X)
    assert (found.repeats, found.body) == (30, 4)
    assert found.line.startswith("tests/doctor/test_inside.py:") or "test_inside.py:" in found.line
    assert program(jax.jit(looped(30)), X)[:2] == (30, 4)  # inside of another program
    assert program(jax.grad(lambda x: looped(30)(x).sum()), X).repeats >= 28


@pytest.mark.parametrize(
    "function",
    [
        looped(4),
        lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y) + jnp.sin(y), x),
        lambda x: jax.tree.map(lambda leaf: jnp.tanh(leaf * 0.9) + leaf, [x] * 40),  # an optimizer's update
        lambda x: [jnp.sin(x[:i, :j]) for i in range(1, 4) for j in range(1, 4)],
    ],
    ids=["short", "fori_loop", "tree.map", "shapes"],
)
def test_no_unrolled_loop(function):
    assert program(function, X) is None


@pytest.mark.parametrize(("flags", "run"), [([], (0, 0)), ([0, 0], (0, 0)), ([1], (0, 1)), ([1, 0, 1, 1], (2, 2))])
def test_longest_run(flags, run):
    assert longest_run(np.array(flags, bool)) == run


def test_the_line_is_the_users():
    here = user_line()
    assert here.endswith(f"test_inside.py:{sys._getframe().f_lineno - 1}")
    called = jax.tree.map(lambda _: user_line(), [0])[0]
    assert called.endswith(f"test_inside.py:{sys._getframe().f_lineno - 1}")
    assert not is_users(jax.__file__)
    assert not is_users(os.path.join(sysconfig.get_path("stdlib"), "threading.py"))
    assert not is_users("/opt/env/lib/python3.12/site-packages/flax/linen/module.py")
    assert is_users("/home/me/train.py")


def test_a_hook_that_fails_is_something_that_could_not_be_checked(tmp_path):
    record = Record(tmp_path)
    with record.guarded("arguments"):
        raise KeyError("x")
    record.write()
    (file,) = tmp_path.glob("*.json")
    checks = {check.name: check for check in job_checks(json.loads(file.read_text()))}
    assert checks["hook for arguments"].severity == "unknown"
    assert checks["hook for arguments"].finding == "failed: KeyError: 'x'"


def test_a_forked_process_does_not_write_the_record(tmp_path, monkeypatch):
    record = Record(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    record.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "files",
    [{"schedstat": "2000000000 1000000000 7"}, {"stat": f"7 (a (b) c) S {'0 ' * 10}{3 * HZ} 0 0"}],
)
def test_how_long_a_thread_was_busy(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert busy_seconds(tmp_path) == 3
    assert waiting_seconds(tmp_path) == (1 if "schedstat" in files else 0)
