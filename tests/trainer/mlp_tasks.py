"""The bundled MLP as the tests train it, and its oracle: gradient by the chain rule, and Adam, in NumPy float64.

Weights of the oracle are a list of (kernel [in, out], bias [out]), from the first hidden layer to the scores.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import Mode, Program, compiled, mesh_for
from feedline._src.trainer.task import Task

Floats = NDArray[np.float64]
Weights = list[tuple[Floats, Floats]]
Rows = dict[str, NDArray[Any]]


def task_of(sizes: Sizes, optimizer: optax.GradientTransformation | None = None, seed: int = 0) -> Task:
    return Task(*classifier(sizes), optimizer or optax.adam(3e-3), seed)


def sharding_of(mode: Mode) -> NamedSharding:
    return NamedSharding(mesh_for(mode), P("data"))


@functools.cache
def program_of(mode: Mode, sizes: Sizes, rows: int = 64, *, padded: bool = False) -> Program:
    """The program for batches of so many images of 8 × 8 bytes; `padded` batches have the leaf `valid`."""
    sharding = sharding_of(mode)
    spec = {
        "image": jax.ShapeDtypeStruct((rows, 8, 8), np.uint8, sharding=sharding),
        "label": jax.ShapeDtypeStruct((rows,), np.int32, sharding=sharding),
    }
    if padded:
        spec["valid"] = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=sharding)
    return compiled(task_of(sizes), mode, spec)


def placed(rows: Rows, mode: Mode) -> dict[str, jax.Array]:
    return jax.device_put(rows, sharding_of(mode))


def made_up_rows(count: int, seed: int = 0) -> Rows:
    """Random bytes with random labels: {"image": uint8 [count, 8, 8], "label": int32 [count]}."""
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(256, size=(count, 8, 8), dtype=np.uint8),
        "label": random.integers(10, size=count, dtype=np.int32),
    }


def weights_of(parameters: Any) -> Weights:
    """The trainer's parameters as the oracle has them."""
    layers = [parameters["hidden"][i] for i in sorted(parameters["hidden"])] + [parameters["scores"]]
    return [
        tuple(np.asarray(jax.device_get(layer[name][...]), np.float64) for name in ("kernel", "bias"))
        for layer in layers
    ]  # type: ignore[misc]


def gelu(x: Floats) -> tuple[Floats, Floats]:
    """GELU in its form with tanh (Hendrycks and Gimpel 2016), and its derivative."""
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) * slope / 2


def forward(weights: Weights, image: NDArray[Any]) -> tuple[list[Floats], list[Floats]]:
    """For each layer its input, and its sums before the activation; the last sums are the scores."""
    inputs = [image.reshape(len(image), -1).astype(np.float64) / 255]
    sums = []
    for kernel, bias in weights:
        sums.append(inputs[-1] @ kernel + bias)
        inputs.append(gelu(sums[-1])[0])
    return inputs[:-1], sums


def losses(scores: Floats, label: NDArray[Any]) -> Floats:
    """Softmax cross entropy of each row: -log(exp z_label / Σ exp z)."""
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return -np.log(odds[np.arange(len(label)), label] / odds.sum(axis=1))


def loss_and_gradient(weights: Weights, rows: Rows) -> tuple[float, Weights]:
    """Mean loss of the rows whose `valid` is True (all, if there is none), and its gradient."""
    valid = rows.get("valid", np.ones(len(rows["label"]), bool))
    image, label = rows["image"][valid], rows["label"][valid]
    inputs, sums = forward(weights, image)
    z = sums[-1]
    odds = np.exp(z - z.max(axis=1, keepdims=True))
    signal = odds / odds.sum(axis=1, keepdims=True)
    signal[np.arange(len(label)), label] -= 1
    signal /= len(label)
    gradient: Weights = []
    for layer in reversed(range(len(weights))):
        gradient.insert(0, (inputs[layer].T @ signal, signal.sum(axis=0)))
        if layer:
            signal = (signal @ weights[layer][0].T) * gelu(sums[layer - 1])[1]
    return float(losses(z, label).mean()), gradient


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
