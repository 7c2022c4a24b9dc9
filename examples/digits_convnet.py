"""A convolutional network in plain JAX, trained with `feedline.trainer.fit` on all devices.

python examples/digits_convnet.py
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import feedline
from feedline.trainer import CSVLog, LiveLine, digits, fit, mean_of_valid, mesh_for

CHANNELS = (1, 32, 64, 64)
STEPS = 300


def init(key):
    """The parameters: a tree of arrays. Weights are scaled so that signals keep their size (He et al. 2015)."""
    *of_convolutions, of_scores = jax.random.split(key, len(CHANNELS))
    he = jax.nn.initializers.he_normal()
    return {
        "convolutions": [
            {"kernel": he(k, (3, 3, before, after)), "bias": jnp.zeros(after)}
            for k, before, after in zip(of_convolutions, CHANNELS, CHANNELS[1:], strict=False)
        ],
        "scores": {"kernel": he(of_scores, (4 * CHANNELS[-1], 10)), "bias": jnp.zeros(10)},
    }


def scores_of(params, image):
    """uint8 [B, 64] → scores of the ten classes, float32 [B, 10]."""
    signal = image.reshape(-1, 8, 8, 1) / 255.0
    for i, layer in enumerate(params["convolutions"]):
        signal = jax.lax.conv_general_dilated(
            signal, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        signal = jax.nn.gelu(signal + layer["bias"])
        if i:  # halve the image: 8 × 8, 4 × 4, 2 × 2
            b, h, w, c = signal.shape
            signal = signal.reshape(b, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
    return signal.reshape(len(signal), -1) @ params["scores"]["kernel"] + params["scores"]["bias"]


def loss(params, batch):
    """The mean cross-entropy of a batch, and its accuracy. Rows that pad the last test batch are left out."""
    scores = scores_of(params, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
    right = scores.argmax(axis=1) == batch["label"]
    return mean_of_valid(losses, batch), {"accuracy": mean_of_valid(right.astype(jnp.float32), batch)}


def main(folder: Path) -> None:
    rows = digits()  # 1,437 and 360 images of 8 × 8 pixels
    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec("data"))
    in_order = feedline.Order(shuffle=False)
    with (
        feedline.Feed(rows.train, 64, sharding) as feed,
        feedline.Feed(rows.test, 64, sharding, order=in_order, epochs=1, remainder="pad") as test,
        LiveLine(STEPS, feed=feed) as live,
        CSVLog(folder / "log.csv") as log,
    ):
        fitted = fit(
            feed,
            init,
            loss,
            optax.adamw(optax.cosine_decay_schedule(2e-3, STEPS), weight_decay=1e-2),
            steps=STEPS,
            seed=0,
            evaluation=test,
            evaluate_every=100,
            callbacks=[live, log],
        )
        result = fitted.evaluate(test)
    for entry in fitted.history:
        if "eval_accuracy" in entry:
            print(f"step {entry['step']}, loss {entry['loss']:.4f}, test accuracy {entry['eval_accuracy']:.4f}")
    print(f"test accuracy {result.metrics['accuracy']:.4f} over {result.rows} images, log in {folder / 'log.csv'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
