"""The training that `feedline bench modes` and `feedline bench practices` measure: a deep MLP with ReLU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.feed import Feed
from feedline._src.tools.bench.machine import compiled_bytes
from feedline._src.trainer.modes import AXIS, Mode, Practices, Program, compiled, mesh_for
from feedline._src.trainer.task import Task

_BATCHES = 4  # in the data
_PREFETCH = 2
Rows = dict[str, npt.NDArray[Any]]
Remat = Literal["none", "all", "cheap"]
"""What is recomputed for the gradient: nothing, all from a block's input, or all but the matrix products."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """An MLP with ReLU that predicts `outputs` numbers from `inputs`, with Adam 1e-4 and mean squared error.

    Attributes:
      depth: hidden layers.
      width: units in each hidden layer.
      rows: rows in the global batch.
      remat: rematerialisation of blocks of √depth hidden layers. For blocks of one layer it would save nothing:
        with ReLU, the gradient needs only the layer's input.
      ship: dtype of the inputs in the batch. "uint8": 0 … 255, which the step divides by 255. "float32": inputs
        that are divided already.
    """

    depth: int
    width: int
    inputs: int
    outputs: int
    rows: int
    remat: Remat = "none"
    ship: Literal["float32", "uint8"] = "float32"

    def __str__(self) -> str:
        return (
            f"{self.inputs:,} inputs, {self.depth} × {self.width:,} ReLU, {self.outputs} outputs; "
            f"{self.rows:,} rows a batch"
        )

    @property
    def widths(self) -> list[int]:
        return [self.inputs, *[self.width] * self.depth, self.outputs]

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products of a step.

        Each layer has one product forward and two backward, for the kernel's gradient and for the input's. The
        first layer needs no gradient of its input.
        """
        products = [math.prod(pair) for pair in itertools.pairwise(self.widths)]
        return 2 * self.rows * (3 * sum(products) - products[0])

    def for_devices(self) -> Workload:
        """Round the batch size down to a multiple of the number of devices, at least one row for each."""
        devices = jax.device_count()
        return dataclasses.replace(self, rows=max(devices, self.rows // devices * devices))

    def task(self) -> Task:
        """Model, loss and optimizer, with seed 0. A batch has `x` [B, inputs] and `y` float32 [B, outputs]."""

        def init(key: jax.Array) -> Any:
            keys = jax.random.split(key, len(self.widths) - 1)
            return [
                (jax.random.normal(k, shape) * math.sqrt(2 / shape[0]), jnp.zeros(shape[1]))
                for k, shape in zip(keys, itertools.pairwise(self.widths), strict=True)
            ]

        def block(signal: jax.Array, layers: Any) -> jax.Array:
            for kernel, bias in layers:
                signal = jax.nn.relu(signal @ kernel + bias)
            return signal

        hidden, length = block, math.isqrt(self.depth)
        if self.remat != "none":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.remat == "cheap" else None
            hidden = jax.checkpoint(block, policy=policy)

        def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            signal = batch["x"]
            if signal.dtype == jnp.uint8:
                signal = signal.astype(params[0][0].dtype) / 255
            for begin in range(0, self.depth, length):
                signal = hidden(signal, params[begin : min(begin + length, self.depth)])
            kernel, bias = params[-1]
            return jnp.mean((signal @ kernel + bias - batch["y"]).astype(jnp.float32) ** 2), {}

        return Task(init, loss, optax.adam(1e-4))

    def data(self, batches: int) -> Rows:
        """Rows for this many batches. The targets are a smooth function of the inputs."""
        chance = np.random.default_rng(0)
        x = chance.integers(256, size=(batches * self.rows, self.inputs), dtype=np.uint8)
        into = chance.standard_normal((self.inputs, self.outputs), dtype=np.float32) / math.sqrt(self.inputs)
        scaled = x.astype(np.float32) / 255
        return {"x": scaled if self.ship == "float32" else x, "y": np.tanh((scaled - 0.5) @ into)}


@contextlib.contextmanager
def prepared(
    workload: Workload, mode: Mode, practices: Practices | None = None, steps_per_call: int = 1
) -> Iterator[tuple[Feed, Program, dict[str, Any]]]:
    """A feed of the data, the compiled program that trains on it, and {"rows", "compile_s", "compiled_bytes"}."""
    sharding = NamedSharding(mesh_for(mode), P(AXIS))
    rows = workload.data(max(_BATCHES, steps_per_call))
    with Feed(rows, workload.rows, sharding, prefetch=_PREFETCH, steps_per_call=steps_per_call) as feed:
        program = compiled(workload.task(), mode, feed.spec, practices or Practices(), steps_per_call)
        began = time.perf_counter()
        step, executable = program.compile()
        compile_s, needed = time.perf_counter() - began, compiled_bytes(executable, feed.spec, _PREFETCH + 1)
        yield (
            feed,
            program._replace(step=step),
            {"rows": workload.rows, "compile_s": compile_s, "compiled_bytes": needed},
        )


PRESETS = {
    "small": Workload(depth=6, width=256, inputs=256, outputs=10, rows=1024),
    "short": Workload(depth=2, width=64, inputs=64, outputs=10, rows=64),
    "reference": Workload(depth=90, width=2056, inputs=1024, outputs=10, rows=256 * 27),
}
