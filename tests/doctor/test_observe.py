"""The parts that observe a job: unrolled loops, the user's lines, stacks, failed hooks."""

import os
import sys
import sysconfig
import threading

import jax
import jax.numpy as jnp
import numpy as np

import feedline
from feedline._src.tools.doctor.job import Ran, job_findings
from feedline._src.tools.doctor.observe import Record
from feedline._src.tools.doctor.sampling import FETCH, INPUT, PLACE, activity, room_of, user_line
from feedline._src.tools.doctor.unrolled import unrolled

X = np.ones((4, 4), np.float32)


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
    assert (found["repeats"], found["body"]) == (30, 4)
    assert "test_observe.py:" in found["loop"]
    assert program(jax.jit(looped(30)), X)["repeats"] == 30  # a loop inside another program
    assert program(jax.grad(lambda x: looped(30)(x).sum()), X)["repeats"] >= 28


def test_no_unrolled_loop():
    for function in (
        looped(4),
        lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y) + jnp.sin(y), x),
        lambda x: jax.tree.map(lambda leaf: jnp.tanh(leaf * 0.9) + leaf, [x] * 40),  # an optimizer's update
        lambda x: [jnp.sin(x[:i, :j]) for i in range(1, 4) for j in range(1, 4)],
    ):
        assert program(function, X) is None


def test_the_line_is_the_users():
    here = user_line(sys._getframe())
    assert here.endswith(f"test_observe.py:{sys._getframe().f_lineno - 1}")
    called = jax.tree.map(lambda _: user_line(sys._getframe()), [0])[0]
    assert called.endswith(f"test_observe.py:{sys._getframe().f_lineno - 1}")
    assert room_of(jax.__file__) == "jax"
    assert room_of(os.path.join(sysconfig.get_path("stdlib"), "threading.py")) == "machinery"
    assert room_of("/opt/env/lib/python3.12/site-packages/flax/linen/module.py") == "library"
    assert room_of("/home/me/train.py") == "user"


def test_a_hook_that_fails_is_something_that_could_not_be_checked():
    written = []
    record = Record(written.append)
    with record.guarded("arguments"):
        raise KeyError("x")
    record.write()
    found = {each.name: each for each in job_findings(Ran(0, False, written, ""))}
    assert found["hook for arguments"].severity == "unknown"
    assert found["hook for arguments"].finding == "failed: KeyError: 'x'"


def test_what_a_stack_shows():
    """From stacks inside jax, `activity` finds the user's line and its kind. The stacks come from `setprofile`."""
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
    assert kinds[PLACE] == "jax.device_put("
    assert kinds[INPUT] == "next(batches)"


def test_the_line_of_a_packaged_program_is_its_own():
    """All files on this stack are of installed packages, even the program's; its line counts as the user's."""
    seen = []
    scope = {"note": lambda frame: seen.append(activity(frame)), "sys": sys}
    loader = "class Batches:\n  def __next__(self): note(sys._getframe())"
    exec(compile(loader, "/x/site-packages/loader/batches.py", "exec"), scope)
    exec(compile("def main(): Batches().__next__()", "/x/site-packages/mine/train.py", "exec"), scope)
    thread = threading.Thread(target=scope["main"])
    thread.start()
    thread.join()
    assert [(each.kind, each.line) for each in seen] == [(INPUT, "/x/site-packages/mine/train.py:1")]
