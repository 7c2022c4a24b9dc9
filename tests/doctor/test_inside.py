"""What observes a job, by itself: unrolled loops, lines, the record and its failures."""

import json
import os
import sys
import sysconfig
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import feedline
from feedline._src.tools.doctor.inside import loop
from feedline._src.tools.doctor.inside.loop import StepProfile, thread_times
from feedline._src.tools.doctor.inside.program import unrolled
from feedline._src.tools.doctor.inside.record import Record
from feedline._src.tools.doctor.inside.stacks import FETCH, INPUT, PLACE, activity, is_users, user_line
from feedline._src.tools.doctor.inside.watched import changed
from feedline._src.tools.doctor.job_checks import job_checks

X, LARGE = np.ones((4, 4), np.float32), np.ones(99)
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


def test_the_line_is_the_users():
    here = user_line(sys._getframe())
    assert here.endswith(f"test_inside.py:{sys._getframe().f_lineno - 1}")
    called = jax.tree.map(lambda _: user_line(sys._getframe()), [0])[0]
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


def test_what_a_stack_shows():
    """The stack inside of a call of jax, from a profile function of this thread."""
    seen = []

    def note(frame, event, _):
        if event == "call":
            seen.append(activity(frame))

    array = jax.numpy.float32(3)
    batches = feedline.prefetch_to_mesh([{"x": X}], jax.devices()[0], prefetch=0)
    sys.setprofile(note)
    float(array)
    jax.device_put(
        X,
    )
    next(batches)
    sys.setprofile(None)
    kinds = {kind: text for kind, line, text in seen if kind}
    assert kinds[FETCH] == "float(array)"
    assert kinds[PLACE] == "jax.device_put(…"
    assert kinds[INPUT] == "next(batches)"


def test_the_line_of_a_packaged_program_is_its_own():
    """On a stack without a file of the user's: the program, the loader and jax are all installed packages."""
    seen = []
    scope = {"note": lambda frame: seen.append(activity(frame)), "sys": sys}
    loader = "class Batches:\n  def __next__(self): note(sys._getframe())"
    exec(compile(loader, "/x/site-packages/loader/batches.py", "exec"), scope)
    exec(compile("def main(): Batches().__next__()", "/x/site-packages/mine/train.py", "exec"), scope)
    thread = threading.Thread(target=scope["main"])
    thread.start()
    thread.join()
    assert [(each.kind, each.line) for each in seen] == [(INPUT, "/x/site-packages/mine/train.py:1")]


def test_a_profile_of_steps_leaves_that_of_the_user_alone(tmp_path):
    mine = lambda *_: None  # noqa: E731
    sys.setprofile(mine)
    profile = StepProfile(Record(tmp_path).guarded)
    profile.begin()
    assert sys.getprofile() is mine
    profile.end()
    assert sys.getprofile() is mine
    sys.setprofile(None)
    assert profile.steps == 0


def test_a_profile_of_steps_sees_what_each_step_does(tmp_path):
    profile, values = StepProfile(Record(tmp_path).guarded), [jnp.float32(i) for i in range(9)]
    for value in values:
        profile.end()
        profile.begin()
        jax.device_put({"x": LARGE})
        jnp.asarray(X), jnp.float32(0.1), value * 2, jax.device_put(value, jax.devices()[0])  # small, or there
        if float(value) == 3:
            break
    profile.end()
    assert sys.getprofile() is None
    assert {(seen.kind, seen.text): count for seen, count in profile.lines.items()} == {
        (PLACE, 'jax.device_put({"x": LARGE})'): 3,
        (FETCH, "float(value)"): 3,
    }


def test_a_profile_ends_if_no_step_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_EVENTS", 50)
    profile = StepProfile(Record(tmp_path).guarded)
    profile.begin()
    for _ in range(100):
        user_line(None)
    assert sys.getprofile() is None
    profile.end()
    profile.begin()  # a loop with as much Python between its steps would be slow in each of them
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    "files",
    [{"schedstat": "2000000000 1000000000 7"}, {"stat": f"7 (a (b) c) S {'0 ' * 10}{3 * HZ} 0 0"}],
)
def test_how_long_a_thread_was_busy(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert thread_times(tmp_path) == ((2, 1) if "schedstat" in files else (3, 0))


def test_what_changed():
    assert changed({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b: 2 → 3"
    assert changed({"a": "1"}, {"b": "1"}) == "a: 1 → none, b: none → 1"
    many = {str(i): "0" for i in range(5)}
    assert changed(many, dict.fromkeys(many, "1")) == "0: 0 → 1, 1: 0 → 1 and 3 more arguments"
