"""Which share of the rate of matrix products does a step of an MLP reach?"""

import functools
import itertools
import statistics
import time
from collections import deque

import jax
from jax.sharding import NamedSharding, PartitionSpec
from shared.rounds import alternate

import feedline
from feedline._src.tools.bench.machine import compiled_bytes, device_peak
from feedline._src.tools.bench.modes import step_s
from feedline._src.trainer.loop import train
from feedline._src.trainer.modes import AXIS, Practices, compiled, mesh_for

_PRODUCTS = 16
"""Matrix products in one call, so that its dispatch does not count."""
_IN_FLIGHT = 2
_REPORT_EVERY = 10
_BATCHES = 4  # in the data


def matmul_cases(scale):
    """The step in bfloat16 beside matrix products, of a hidden layer's size and of square matrices."""
    return {"bfloat16": lambda: matmul_share(scale.training, "bfloat16", scale.square, scale.rounds, 1.0)}


def matmul_share(workload, compute, square, rounds, seconds):
    """The step's floating-point operations a second as a share of those of matrix products, in one dtype.

    The products are those of a hidden layer, and of square matrices. All are measured alternately in this process.
    `of_matmul` is the share of the faster ones.
    """
    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec(AXIS))
    with feedline.Feed(workload.data(_BATCHES), workload.rows, sharding) as feed:
        program = compiled(workload.task(), "jit_multi", feed.spec, Practices(compute=compute))
        began = time.perf_counter()
        step, executable = program.compile()
        compile_s = time.perf_counter() - began
        run = _Steps(program._replace(step=step), workload.flops)
        devices = program.mesh.size
        resident = itertools.repeat(next(feed))
        entrants = {
            "step": functools.partial(run.rate, resident),
            "fed": functools.partial(run.rate, feed),
            "layer": _products(workload.rows, workload.width, compute, sharding),
            "square": _products(square * devices, square, compute, sharding),
        }
        alternate(entrants, 1, 0)  # everything is compiled
        peak = device_peak()
        rates = {name: list(of.values()) for name, of in alternate(entrants, rounds, seconds).items()}
    return {
        "compute": compute,
        "devices": devices,
        "rows": workload.rows,
        "compile_s": compile_s,
        "compiled_bytes": compiled_bytes(executable, feed.spec),
        "peak_bytes": peak,
        **_shares(workload.flops, rates),
    }


def _shares(flops, rates):
    """The medians of the rates, and of the shares in each round."""
    products = [max(pair) for pair in zip(rates["layer"], rates["square"], strict=True)]
    of_matmul = {
        name: statistics.median(rate / most for rate, most in zip(rates[name], products, strict=True))
        for name in ("step", "fed")
    }
    return {
        "flops": flops,
        "flops_per_s": {name: statistics.median(of) for name, of in rates.items()},
        "flops_per_s_samples": rates,
        "step_ms": flops / statistics.median(rates["step"]) * 1e3,
        "fed_step_ms": flops / statistics.median(rates["fed"]) * 1e3,
        "of_matmul": of_matmul["step"],
        "fed_of_matmul": of_matmul["fed"],
    }


class _Steps:
    """Runs the training loop again and again, each time from the last state."""

    def __init__(self, program, flops):
        self._program, self._flops = program, flops
        self._state = program.start()
        self._step_s = 0.0  # in the last run

    def rate(self, batches, seconds):
        steps = 5 if not self._step_s else 1 + max(4, round(seconds / self._step_s))
        self._state, progress = train(
            self._program, self._state, itertools.islice(batches, steps), report_every=_REPORT_EVERY
        )
        self._step_s = step_s(progress)
        return self._flops / self._step_s


def _products(rows, width, dtype, sharding):
    """(seconds) → floating-point operations a second of [rows, width] @ [width, width]. The values are random:
    with constant ones, a GPU needs less power and is faster."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    keys = jax.random.split(jax.random.key(0))

    def normal(key, rows):
        return jax.random.normal(key, (rows, width), dtype)

    left = jax.jit(lambda key: normal(key, rows), out_shardings=sharding)(keys[0])
    right = jax.jit(lambda key: normal(key, width) / width**0.5, out_shardings=everywhere)(keys[1])

    @jax.jit
    def many(left, right):
        for _ in range(_PRODUCTS):  # unrolled: a loop on the device may copy the matrix in each iteration
            left = left @ right
        return left

    def rate(seconds):
        many(left, right).block_until_ready()
        began, count, running = time.perf_counter(), 0, deque()
        while not count or time.perf_counter() - began < seconds:
            running.append(many(left, right))
            count += 1
            if len(running) > _IN_FLIGHT:
                running.popleft().block_until_ready()
        jax.block_until_ready(list(running))
        return 2 * rows * width**2 * _PRODUCTS * count / (time.perf_counter() - began)

    return rate
