"""The loop: what it counts, how far it runs ahead, what it reports."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from feedline._src.trainer import loop as module
from feedline._src.trainer.loop import Loop, Progress, evaluate, train
from feedline._src.trainer.modes import Program


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s

    def passes(self, seconds, value):
        self.now_s += seconds
        return value


class Metrics:
    """The metrics of a step: known once they were waited for."""

    shape = (1,)

    def __init__(self, loss, clock, seconds):
        self.loss, self.clock, self.seconds, self.done = loss, clock, seconds, False

    def block_until_ready(self):
        self.clock.now_s += self.seconds
        self.done = True
        return self

    def reshape(self, *shape):
        assert self.done, "metrics must not be read before their step is done"
        return np.array([[self.loss]])


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(jax, "device_get", lambda array: array)
    return clock


def batches_of(clock, count, rows=10, seconds=0.0):
    return (clock.passes(seconds, {"label": np.zeros(rows)}) for _ in range(count))


def program_of(clock, seconds=0.0, seen=None, losses=None):
    """A program whose step k has the loss `losses[k]`; by default 10, 9, …"""

    def step(state, batch):
        after = Metrics(10.0 - state.step if losses is None else losses[state.step], clock, seconds)
        if seen is not None:
            seen.append(after)
        return SimpleNamespace(step=state.step + 1), after

    return Program(None, ("loss",), None, step, None, None)


def test_time_counts_from_the_end_of_the_first_step(clock):
    state, progress = train(
        program_of(clock, seconds=2.0), SimpleNamespace(step=0), batches_of(clock, 5, seconds=3.0)
    )
    assert state.step == 5
    assert progress == Progress(5, {"loss": 6.0}, 0, rows=50, elapsed_s=20.0, elapsed_rows=40, wait_s=12.0)
    assert progress.rows_per_s == 2.0
    assert progress.wait_share == 0.6


def test_at_most_two_steps_run_while_a_batch_is_asked_for(clock):
    steps, running = [], []

    def batches():
        for _ in range(6):
            running.append(sum(not step.done for step in steps))
            yield {"label": np.zeros(10)}

    train(program_of(clock, seen=steps), SimpleNamespace(step=0), batches())
    assert running == [0, 0, 1, 2, 2, 2]  # the first step is waited for: it compiles
    assert all(step.done for step in steps)


def test_saves_between_two_reports_fetch_the_metrics_of_each_step_once(clock, monkeypatch):
    monkeypatch.setattr(module, "all_finite", lambda params: True)
    steps, fetched = [], []
    monkeypatch.setattr(jax, "device_get", lambda arrays: [fetched.append(array) or array for array in arrays])
    loop = Loop(program_of(clock, seen=steps, losses=range(100)), 0, report_every=100)
    for state in loop.steps(SimpleNamespace(step=0), batches_of(clock, 100)):
        if state.step % 10 == 0:
            loop.check(None)
    assert loop.end().loss == 99
    assert len(fetched) < 120


def test_a_batch_of_padding_weighs_nothing_in_an_evaluation():
    results = iter([(np.float32([2, 5]), np.int32(3)), (np.float32([np.nan, 0]), np.int32(0))])
    program = Program(None, ("loss", "a"), None, None, lambda params, batch: next(results), None)
    found = evaluate(program, None, [0, 1])
    assert (found.rows, list(found.metrics.items())) == (3, [("loss", 2.0), ("a", 5.0)])
    with pytest.raises(ValueError, match="at least one row that counts"):
        evaluate(program, None, [])
