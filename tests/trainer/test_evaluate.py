"""Evaluation: every row of a test set counts exactly once, however it is padded."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from mlp_oracle import losses, made_up_rows, scores, weights_of

from feedline.trainer.evaluate import evaluate
from feedline.trainer.learner import Learner
from feedline.trainer.model import MLP, Sizes
from feedline.trainer.modes import compiled

ROWS = made_up_rows(100)


@functools.cache
def program_of(mode):
    sizes = Sizes(features=64, classes=10, width=32)
    return compiled(Learner(lambda: MLP(sizes, rngs=nnx.Rngs(0)), optax.adam(1e-3)), mode)


def padded(rows, batch_size, sharding):
    """Batches over all rows; the last one is filled up with rows from the start, which are not valid."""
    count = len(rows["label"])
    for start in range(0, count, batch_size):
        position = np.arange(start, start + batch_size)
        batch = {name: leaf[position % count] for name, leaf in rows.items()}
        yield jax.device_put({**batch, "valid": position < count}, sharding)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit_single", "jit_multi", "pmap"])
@pytest.mark.parametrize("batch_size", [40, 104])
def test_each_row_counts_once(mode, batch_size):
    program = program_of(mode)
    parameters = program.init().parameters
    z = scores(weights_of(parameters), ROWS["image"])
    found = evaluate(program.sums, parameters, padded(ROWS, batch_size, program.sharding))
    correct = int((z.argmax(axis=1) == ROWS["label"]).sum())
    assert (found.rows, found.correct, found.accuracy) == (100, correct, correct / 100)
    assert found.loss == pytest.approx(losses(z, ROWS["label"]).mean(), rel=1e-6)


def test_without_valid_all_rows_count():
    program = program_of("jit_multi")
    batch = jax.device_put({name: leaf[:96] for name, leaf in ROWS.items()}, program.sharding)
    assert evaluate(program.sums, program.init().parameters, [batch, batch]).rows == 192


@pytest.mark.slow
def test_nothing_moves_without_being_asked():
    program = program_of("pmap")
    batches, parameters = list(padded(ROWS, 40, program.sharding)), program.init().parameters
    with jax.transfer_guard("disallow"):
        assert evaluate(program.sums, parameters, batches).rows == 100


def test_no_row_is_refused():
    program = program_of("jit_single")
    with pytest.raises(ValueError, match="at least one row that counts"):
        evaluate(program.sums, program.init().parameters, [])
