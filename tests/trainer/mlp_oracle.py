"""What the trainer is held against: the MLP, its gradient by the chain rule, and Adam, in NumPy float64.

Weights are a list of (kernel [in, out], bias [out]), from the first hidden layer to the scores.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = list[tuple[Floats, Floats]]
Rows = dict[str, NDArray[Any]]


def made_up_rows(count: int, shape: tuple[int, ...] = (8, 8), classes: int = 10, seed: int = 0) -> Rows:
    """Random bytes with random labels: {"image": uint8 [count, *shape], "label": int32 [count]}."""
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(256, size=(count, *shape), dtype=np.uint8),
        "label": random.integers(classes, size=count, dtype=np.int32),
    }


def weights_of(parameters: Any) -> Weights:
    """The trainer's parameters as the oracle has them."""
    layers = [parameters["hidden"][i] for i in sorted(parameters["hidden"])] + [parameters["scores"]]
    return [
        tuple(np.asarray(jax.device_get(layer[name][...]), np.float64) for name in ("kernel", "bias"))
        for layer in layers
    ]  # type: ignore[misc]


def scores(weights: Weights, image: NDArray[Any]) -> tuple[Floats, list[Floats]]:
    """Scores [B, classes], and the input of each layer."""
    signal = image.reshape(len(image), -1).astype(np.float64)
    if image.dtype == np.uint8:
        signal /= 255
    inputs = []
    for kernel, bias in weights:
        inputs.append(signal)
        signal = np.maximum(signal @ kernel + bias, 0)
    kernel, bias = weights[-1]
    return inputs[-1] @ kernel + bias, inputs


def losses(scores: Floats, label: NDArray[Any]) -> Floats:
    """Softmax cross entropy of each row: -log(exp z_label / Σ exp z)."""
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return -np.log(odds[np.arange(len(label)), label] / odds.sum(axis=1))


def loss_and_gradient(weights: Weights, rows: Rows) -> tuple[float, Weights]:
    """Mean loss of the rows whose `valid` is True (all, if there is none), and its gradient."""
    valid = rows.get("valid", np.ones(len(rows["label"]), bool))
    image, label = rows["image"][valid], rows["label"][valid]
    z, inputs = scores(weights, image)
    odds = np.exp(z - z.max(axis=1, keepdims=True))
    signal = odds / odds.sum(axis=1, keepdims=True)
    signal[np.arange(len(label)), label] -= 1
    signal /= len(label)
    gradient: Weights = []
    for (kernel, _), before in reversed(list(zip(weights, inputs, strict=True))):
        gradient.append((before.T @ signal, signal.sum(axis=0)))
        signal = (signal @ kernel.T) * (before > 0)
    return float(losses(z, label).mean()), gradient[::-1]


def adam(weights: Weights, batches: list[Rows], rate: float) -> tuple[Weights, list[float]]:
    """Weights after Adam (Kingma and Ba 2015, algorithm 1) on `batches`, and the loss before each step."""
    flat = [array for layer in weights for array in layer]
    mean, square = [np.zeros_like(a) for a in flat], [np.zeros_like(a) for a in flat]
    seen = []
    for t, batch in enumerate(batches, start=1):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        loss, gradient = loss_and_gradient(pairs, batch)
        seen.append(loss)
        for i, g in enumerate(array for layer in gradient for array in layer):
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.999 * square[i] + 0.001 * g**2
            step = (mean[i] / (1 - 0.9**t)) / (np.sqrt(square[i] / (1 - 0.999**t)) + 1e-8)
            flat[i] = flat[i] - rate * step
    return list(zip(flat[::2], flat[1::2], strict=True)), seen
