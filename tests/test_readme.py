"""The README's Python runs as it stands, block after block, with the names it takes for granted."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import feedline
from feedline.order import rows_at

README = Path(__file__).parent.parent / "README.md"


def _given():
    """What the README leaves to the reader: a step, an evaluation, an iterator of batches."""

    def logits(state, batch):
        return (batch["image"].reshape(len(batch["image"]), -1) / 255.0) @ state

    @jax.jit
    def train_step(state, batch):
        def loss(state):
            return -jnp.mean(
                jax.nn.log_softmax(logits(state, batch))[jnp.arange(len(batch["label"])), batch["label"]]
            )

        value, gradient = jax.value_and_grad(loss)(state)
        return state - 0.1 * gradient, value

    @jax.jit
    def evaluate(state, batch):
        right = (logits(state, batch).argmax(axis=1) == batch["label"]) & batch["valid"]
        return right.sum(), batch["valid"].sum()

    def my_batches():
        for i in range(3):
            yield {"image": np.full((64, 4, 4), i, np.uint8), "label": np.zeros(64, np.int32)}

    return {
        "train_step": train_step, "evaluate": evaluate, "my_batches": my_batches,
        "state": np.zeros((16, 10), np.float32),
    }  # fmt: skip


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("image.npy", np.random.default_rng(0).integers(0, 256, (200, 4, 4)).astype(np.uint8))
    np.save("label.npy", np.arange(200, dtype=np.int32) % 10)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 10
    names = _given()
    for block in blocks:
        exec(compile(block, "<README.md>", "exec"), names)  # of a real file Grain would look up the lines
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in printed[:10]] == [f"step {step}" for step in range(0, 100, 10)]
    assert [line.split(" over ")[1] for line in printed[10:12]] == ["200 rows"] * 2
    # 100 steps of 64 rows, 3 an epoch, are 33 epochs and a batch: the next row is number 64 of epoch 33
    assert printed[12].startswith("33 96 [")
    assert names["saved"]["position"] == 64
    # rows of step s, the first being 1: batch s - 1 of 64 rows
    for name, step in (("after_checkpoint", 101), ("at_step_41200", 41_200)):
        epoch, batch = (step - 1) // 3, (step - 1) % 3
        expected = rows_at(feedline.Order(), 200, epoch, np.arange(64 * batch, 64 * batch + 64))
        np.testing.assert_array_equal(names[name], expected)
    assert printed[-1] == "0 bad rows"
    assert Path("bad.jsonl").read_text() == ""
    for feed in ("feed", "test"):
        names[feed].close()


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
