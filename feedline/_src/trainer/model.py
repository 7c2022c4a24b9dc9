"""The bundled model: a multi-layer perceptron that turns images into class scores, and its loss.

Its batches are dicts with B rows:
  image  [B, ...]   any numeric dtype
  label  int [B]    0 … classes − 1
  valid  bool [B]   optional; rows where it is False are ignored
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from feedline._src.trainer.task import Init, Loss, mean_of_valid


class Sizes(NamedTuple):
    """The size of the MLP. It has (features + 1) × width + (layers − 1) × (width + 1) × width +
    (width + 1) × classes parameters of four bytes. For each parameter, Adam keeps two more numbers."""

    features: int  # numbers in one image
    classes: int
    layers: int = 2  # hidden layers
    width: int = 128


class MLP(nnx.Module):
    """Hidden layers with GELU, then one linear layer: image [B, ...] → scores float32 [B, classes].

    uint8 images are divided by 255 within the step, so that only bytes are transferred; XLA fuses the conversion
    into the first layer. Other dtypes are not scaled.

    GELU is smooth, so runs that sum in different orders have nearly equal losses. With ReLU, rounding decides on
    which side of zero a unit is, and losses differ in the third digit after 400 steps.
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        widths = (sizes.features, *[sizes.width] * sizes.layers)
        self.hidden = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths)])
        self.scores = nnx.Linear(sizes.width, sizes.classes, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        signal = image.reshape(image.shape[0], -1).astype(jnp.float32)
        if image.dtype == jnp.uint8:
            signal /= 255
        signal = signal.astype(self.scores.kernel.dtype)
        for layer in self.hidden:
            signal = nnx.gelu(layer(signal))
        return self.scores(signal)


def classifier(sizes: Sizes) -> tuple[Init, Loss]:
    """The MLP in the form that `fit` takes: `init`, and `loss` with the metric "accuracy".

    The loss of a row with scores z is log(Σ_c exp z_c) − z_label.
    """

    def init(key: jax.Array) -> Any:
        return nnx.state(MLP(sizes, rngs=nnx.Rngs(key)), nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: MLP(sizes, rngs=nnx.Rngs(0))))

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = nnx.merge(graph, params)(batch["image"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
        correct = (scores.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
        return mean_of_valid(losses, batch), {"accuracy": mean_of_valid(correct, batch)}

    return init, loss
