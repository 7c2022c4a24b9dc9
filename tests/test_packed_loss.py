"""In the transformer of examples/text.py, packing does not change the loss of documents."""

from pathlib import Path

import jax
import numpy as np
import pytest

from feedline import Packed


@pytest.mark.slow  # the example needs tokenizers, which come with [test-all]
def test_the_loss_of_a_packed_batch_is_that_of_its_documents(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    import text

    random = np.random.default_rng(0)
    lengths = random.choice([3, 7, 11], 30)
    tokens, offsets = random.integers(0, text.VOCABULARY, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    packed = Packed((tokens, offsets), 32)
    rows = {name: np.empty((len(packed), 32), np.int32) for name in packed.spec}
    packed.read(np.arange(len(packed)), rows)
    assert len(packed) < len(lengths) / 2

    init, loss = text.model(32, 64, 1)
    params, loss = init(jax.random.key(0)), jax.jit(loss)
    together, _ = loss(params, rows | {"source": np.zeros(len(packed), np.int32)})
    alone = []
    for begin, length in zip(offsets, lengths, strict=False):
        row = {
            "tokens": tokens[begin : begin + length],
            "segment_ids": np.ones(length),
            "positions": np.arange(length),
        }
        batch = {name: leaf[None].astype(np.int32) for name, leaf in row.items()} | {
            "source": np.zeros(1, np.int32)
        }
        alone.append(float(loss(params, batch)[0]) * (length - 1))
    np.testing.assert_allclose(float(together), sum(alone) / (lengths - 1).sum(), rtol=1e-5)
