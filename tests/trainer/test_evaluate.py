"""Evaluation: every row of a test set counts exactly once, however it is padded."""

import jax
import numpy as np
import pytest
from mlp_oracle import losses, made_up_rows, scores, weights_of
from mlp_tasks import placed, program_of

from feedline._src.trainer.evaluate import Evaluating
from feedline._src.trainer.model import Sizes

ROWS = made_up_rows(100)
SIZES = Sizes(features=64, classes=10, width=32)


def evaluate(measure, params, batches):
    return Evaluating(measure, params, batches).result()


def padded(rows, batch_size, mode):
    """Batches over all rows; the last one is filled up with rows from the start, which are not valid."""
    count = len(rows["label"])
    for start in range(0, count, batch_size):
        position = np.arange(start, start + batch_size)
        batch = {name: leaf[position % count] for name, leaf in rows.items()}
        yield placed({**batch, "valid": position < count}, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit_single", "jit_multi", "pmap"])
@pytest.mark.parametrize("batch_size", [40, 104])
def test_each_row_counts_once(mode, batch_size):
    program = program_of(mode, SIZES, batch_size, padded=True)
    params = program.start().params
    z = scores(weights_of(params), ROWS["image"])
    found = evaluate(program.measure, params, padded(ROWS, batch_size, mode))
    assert found.rows == 100
    assert found.metrics["accuracy"] == pytest.approx((z.argmax(axis=1) == ROWS["label"]).mean(), rel=1e-6)
    assert found.metrics["loss"] == pytest.approx(losses(z, ROWS["label"]).mean(), rel=1e-6)


def test_without_valid_all_rows_count():
    program = program_of("jit_multi", SIZES, 96)
    batch = placed({name: leaf[:96] for name, leaf in ROWS.items()}, "jit_multi")
    assert evaluate(program.measure, program.start().params, [batch, batch]).rows == 192


@pytest.mark.slow
def test_nothing_moves_without_being_asked():
    program = program_of("pmap", SIZES, 40, padded=True)
    batches, params = list(padded(ROWS, 40, "pmap")), program.start().params
    with jax.transfer_guard("disallow"):
        assert evaluate(program.measure, params, batches).rows == 100


def test_a_batch_of_padding_weighs_nothing():
    results = [(2.0, 5.0, 3), (float("nan"), 0.0, 0)]
    batches = iter([({"a": np.float32(a), "loss": np.float32(loss)}, np.int32(rows)) for loss, a, rows in results])
    found = evaluate(lambda params, batch: next(batches), None, [0, 1])
    assert (found.rows, list(found.metrics.items())) == (3, [("loss", 2.0), ("a", 5.0)])


def test_no_row_is_refused():
    program = program_of("jit_single", SIZES)
    with pytest.raises(ValueError, match="at least one row that counts"):
        evaluate(program.measure, program.start().params, [])
