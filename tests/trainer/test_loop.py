"""The loop: what it counts, how far it runs ahead, what it reports."""

import io
import itertools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from mlp_oracle import made_up_rows
from rich.console import Console

from feedline.trainer import loop
from feedline.trainer.learner import Learner
from feedline.trainer.live import LiveLine, progress_line
from feedline.trainer.loop import NotFinite, Progress, train
from feedline.trainer.model import MLP, Sizes
from feedline.trainer.modes import compiled


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s

    def passes(self, seconds, value):
        self.now_s += seconds
        return value


class Loss:
    """What a step returns: known once it was waited for."""

    def __init__(self, value, clock, seconds=0.0):
        self.value, self.clock, self.seconds, self.done = value, clock, seconds, False

    def block_until_ready(self):
        if not self.done:
            self.clock.now_s += self.seconds
            self.done = True
        return self

    def __float__(self):
        assert self.done, "a loss must not be read before its step is done"
        return float(self.value)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(jax, "device_get", lambda losses: losses)
    return clock


def batches_of(clock, count, rows=10, seconds=0.0):
    return (clock.passes(seconds, {"label": np.zeros(rows)}) for _ in range(count))


def step_of(clock, seconds=0.0, seen=None):
    def step(state, batch):
        loss = Loss(10 - state, clock, seconds)
        if seen is not None:
            seen.append(loss)
        return state + 1, loss

    return step


def test_time_counts_from_the_end_of_the_first_step(clock):
    state, progress = train(step_of(clock, seconds=2.0), 0, batches_of(clock, 5, seconds=3.0))
    assert state == 5
    assert progress == Progress(step=5, rows=50, loss=6.0, elapsed_s=20.0, elapsed_rows=40, wait_s=12.0)
    assert progress.rows_per_s == 2.0
    assert progress.wait_share == 0.6


def test_one_step_has_no_rate(clock):
    _, progress = train(step_of(clock, seconds=2.0), 0, batches_of(clock, 1, seconds=3.0))
    assert (progress.step, progress.rows, progress.loss) == (1, 10, 10.0)
    assert (progress.rows_per_s, progress.wait_share) == (0.0, 0.0)


def test_at_most_two_steps_run_while_a_batch_is_asked_for(clock):
    losses, running = [], []

    def batches():
        for _ in range(6):
            running.append(sum(not loss.done for loss in losses))
            yield {"label": np.zeros(10)}

    train(step_of(clock, seen=losses), 0, batches())
    assert running == [0, 0, 1, 2, 2, 2]  # the first step is waited for: it compiles
    assert all(loss.done for loss in losses)


def test_reports_come_after_the_first_step_in_intervals_and_at_the_end(clock):
    seen = []
    train(step_of(clock), 0, batches_of(clock, 10, seconds=1.0), report=seen.append, report_every_s=3.0)
    assert [progress.step for progress in seen] == [1, 2, 5, 8, 10]
    assert [progress.loss for progress in seen] == [10.0, 9.0, 6.0, 3.0, 1.0]


def test_no_batch_is_refused(clock):
    with pytest.raises(ValueError, match="at least one batch, and the iterator gave none"):
        train(step_of(clock), 0, [])


def test_an_error_of_the_iterator_comes_through(clock):
    def broken():
        yield {"label": np.zeros(10)}
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        train(step_of(clock), 0, broken())


def test_an_endless_iterator_is_cut_by_the_caller_and_loses_no_batch(clock):
    endless = itertools.cycle([{"label": np.zeros(10)}])
    asked = []
    _, progress = train(step_of(clock), 0, itertools.islice((asked.append(b) or b for b in endless), 4))
    assert (progress.step, len(asked)) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit_single", "jit_multi", "pmap"])
def test_there_are_no_implicit_transfers_and_the_loss_falls(mode):
    sizes = Sizes(features=64, classes=10, width=32)
    program = compiled(Learner(lambda: MLP(sizes, rngs=nnx.Rngs(0)), optax.adam(1e-2)), mode)
    batch = jax.device_put(made_up_rows(64), program.sharding)
    seen, start = [], program.init()
    with jax.transfer_guard("disallow"):
        train(program.step, start, itertools.repeat(batch, 50), report=seen.append, report_every_s=0)
    assert [progress.step for progress in seen][-1] == 50
    assert seen[-1].loss < 0.5 * seen[0].loss


FIRST = Progress(step=1, rows=128, loss=2.3, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0)
LATER = Progress(step=1001, rows=128128, loss=0.5, elapsed_s=2.0, elapsed_rows=128000, wait_s=0.1)


def test_progress_as_a_line():
    assert progress_line(FIRST, 2000) == "step 1 of 2,000 | loss 2.3000"
    assert progress_line(LATER, 2000) == (
        "step 1,001 of 2,000 | loss 0.5000 | 64,000 rows/s | waiting for input 5.0%"
    )


def test_without_a_terminal_lines_are_rare():
    told = io.StringIO()
    with LiveLine(2000, Console(file=told)) as live:
        for _ in range(100):
            live(FIRST)
    assert told.getvalue() == "step 1 of 2,000 | loss 2.3000\n"


def test_on_a_terminal_one_line_is_updated_and_erased():
    told = io.StringIO()
    with LiveLine(2000, Console(file=told, force_terminal=True, color_system=None, width=100)) as live:
        live(FIRST)
        live(LATER)
    assert "step 1 of 2,000" in told.getvalue()
    assert "step 1,001 of 2,000" in told.getvalue()
    assert told.getvalue().endswith("\x1b[2K")  # the line is erased


def losses_that_end(clock, values):
    """Steps whose losses are these."""
    left = iter(values)
    return lambda state, batch: (state + 1, Loss(next(left), clock))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_loss_that_is_not_finite_ends_the_loop_at_the_next_fetch(clock, bad):
    given, reported = [], []

    def batches():
        for batch in batches_of(clock, 100, seconds=1.0):
            given.append(batch)
            yield batch

    losses = [1.0] * 6 + [bad] + [float("nan")] * 100
    with pytest.raises(NotFinite, match=f"the loss is {bad} at step 7, the first that is no finite") as told:
        train(losses_that_end(clock, losses), 0, batches(), report=reported.append, report_every_s=10.0)
    assert told.value.step == 7
    assert [progress.step for progress in reported] == [1]
    assert 11 <= len(given) <= 15


def test_a_loss_that_is_not_finite_is_found_at_the_end_without_reports(clock):
    with pytest.raises(NotFinite, match="at step 3"):
        train(losses_that_end(clock, [1.0, 1.0, float("nan")]), 0, batches_of(clock, 3))


def test_at_most_a_hundred_losses_are_kept_between_two_reports(clock):
    done = []

    def batches():
        for batch in batches_of(clock, 1000):
            done.append(batch)
            yield batch

    losses = [1.0] * 233 + [float("nan")] * 800
    with pytest.raises(NotFinite, match="at step 234,"):
        train(losses_that_end(clock, losses), 0, batches(), report_every_s=1e9)
    assert len(done) <= 234 + 100 + 3
