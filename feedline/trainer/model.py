"""The model: a multi-layer perceptron that turns images into class scores."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from feedline.options import checked_integer


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the MLP is.

    Parameters: (features + 1) × width + (layers − 1) × (width + 1) × width + (width + 1) × classes,
    of four bytes each; Adam holds two more numbers for each of them.

    Attributes:
      features: numbers in one image.
      classes: labels are 0 … classes − 1.
      layers: hidden layers.
      width: units in each hidden layer.

    Example:
      >>> Sizes(features=64, classes=10)
      Sizes(features=64, classes=10, layers=2, width=128)
    """

    features: int
    classes: int
    layers: int = 2
    width: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked_integer(f"Sizes.{field.name}", getattr(self, field.name), at_least=1)


class MLP(nnx.Module):
    """Hidden layers with GELU, then one linear layer: image [B, ...] → scores float32 [B, classes].

    GELU is smooth, so runs that sum in another order have close losses. With ReLU, rounding decides on which
    side of zero a unit is, and losses differ in the third digit after 400 steps.

    Example:
      >>> model = MLP(Sizes(features=64, classes=10), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 8, 8), jnp.uint8)).shape
      (2, 10)
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        widths = (sizes.features, *[sizes.width] * sizes.layers)
        self.hidden = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths)])
        self.scores = nnx.Linear(sizes.width, sizes.classes, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        signal = as_features(image)
        for layer in self.hidden:
            signal = nnx.gelu(layer(signal))
        return self.scores(signal)


def as_features(image: jax.Array) -> jax.Array:
    """[B, ...] of any numeric dtype → float32 [B, features]: bytes from 0 … 255 to 0 … 1, all else unscaled.

    It is part of the step, so bytes are transferred, and XLA fuses the conversion into the first layer.
    """
    flat = image.reshape(image.shape[0], -1).astype(jnp.float32)
    return flat / 255 if image.dtype == jnp.uint8 else flat
