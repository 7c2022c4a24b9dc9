"""How fast are batches transferred, and what does a loop lose to its input?"""

import collections
import contextlib
import functools
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.limit import filler
from shared.rounds import alternate, compared

import feedline
from feedline._src.loader.staging import Staging
from feedline._src.placement.place import Placement
from feedline._src.tools.bench.feed import measure_feed

_GROUP = 4
"""Host batches that are created, untimed, before they are transferred one after the other."""
_IN_FLIGHT = 2
"""Transfers in progress at the same time, as with a feed at its default `prefetch`."""
DEPTHS = (0, 1, 2, 3)
AHEAD = (0, 8)
"""How many steps a loop dispatches ahead of the step that it waits for. 0: it waits for each step."""
FACTORS = (1.0, 1.2, 2.0)
"""How long a step is, as a multiple of the time that a batch takes to arrive when nothing is computed."""
_WARM_UP = 8
_PROBE = 8
"""Matrix products in the step that measures the time of one product."""


def transfer_cases(scale):
    """Transfers from pageable memory, feedline's slabs and pinned memory: one leaf or many, one device or all."""
    return {
        f"{mb:g} MB, {leaves} leaves, {count} devices": functools.partial(_transfer, mb, leaves, count, scale)
        for mb in scale.sizes_mb
        for leaves in scale.leaves
        for count in sorted({1, len(jax.devices())})
    }


def _transfer(mb, leaves, count, scale):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), PartitionSpec("data"))
    shard = int(mb * 1e6) // leaves // count
    width = max(64, min(4096, shard // 64 * 64))  # rows of at most 4 KiB
    shape = (max(1, shard // width) * count, width)
    spec = [jax.ShapeDtypeStruct(shape, np.uint8, sharding=sharding)] * leaves
    staging = Staging([(leaf.shape, np.dtype(np.uint8)) for leaf in spec], _GROUP)

    def staged():
        slabs = staging.lease()
        for slab in slabs:
            slab[...] = 1  # allocates its pages
        return slabs

    hosts = {"pageable": lambda: [np.full(leaf.shape, 1, np.uint8) for leaf in spec], "staged": staged}
    placement, shardings = Placement(spec), [leaf.sharding for leaf in spec]
    pinned = jax.device_put(
        [np.full(leaf.shape, 1, np.uint8) for leaf in spec],
        [sharding.with_memory_kind("pinned_host") for sharding in shardings],
    )
    size = sum(leaf.shape[0] * leaf.shape[1] for leaf in spec)
    entrants = {name: functools.partial(_bytes_rate, host, placement.place, size) for name, host in hosts.items()}
    entrants["pinned"] = functools.partial(
        _bytes_rate, lambda: pinned, lambda x: jax.device_put(x, shardings), size
    )
    alternate(entrants, 1, 0)  # allocates memory on host and devices
    rates = alternate(entrants, scale.rounds, scale.seconds)
    return {
        "mb": size / 1e6,
        "leaves": len(spec),
        "devices": spec[0].sharding.num_devices,
        "bytes_per_s": compared(rates, "pinned"),
    }


def _bytes_rate(host, place, size, seconds):
    """Bytes per second, from the call of `place` until the arrays are ready. `host` makes a batch, untimed."""
    spent, moved, until = 0.0, 0, time.perf_counter() + seconds
    while not moved or time.perf_counter() < until:
        batches, placed = [host() for _ in range(_GROUP)], collections.deque()
        began = time.perf_counter()
        for batch in batches:
            if len(placed) == _IN_FLIGHT:
                jax.block_until_ready(placed.popleft())
            placed.append(place(batch))
        jax.block_until_ready(list(placed))
        spent += time.perf_counter() - began
        moved += size * _GROUP
    return moved / spent


class _Work(NamedTuple):
    """The data that all cases share, the rate of the feed alone, and the time of one matrix product."""

    rows: Any
    sharding: Any
    batch_size: int
    state: Any
    weights: Any
    alone: dict[str, Any]
    product_s: float

    def feed(self, prefetch):
        return feedline.Feed(self.rows, self.batch_size, self.sharding, prefetch=prefetch)

    def step(self, factor):
        """A step that takes about `factor` times as long as the feed alone takes for a batch."""
        products = max(1, round(factor / self.alone["batches_per_s"] / self.product_s))
        return functools.partial(_products, self.weights, products)


def utilisation_cases(scale):
    """Accelerator utilisation, as in MLPerf Storage: batches × time of the step on resident data ÷ wall time."""
    return {
        f"step {factor:g} × input, {ahead} ahead": functools.partial(_utilisation, factor, ahead, scale)
        for factor in FACTORS
        for ahead in AHEAD
    }


def _utilisation(factor, ahead, scale):
    work = _work(scale)
    step = work.step(factor)
    with contextlib.ExitStack() as stack:
        feeds = {depth: stack.enter_context(work.feed(depth)) for depth in DEPTHS}
        resident = itertools.repeat(jax.block_until_ready(next(feeds[0])))
        entrants = {
            str(name): functools.partial(_rate, step, work.state, batches, ahead)
            for name, batches in [*feeds.items(), ("resident", resident)]
        }
        alternate(entrants, 1, 0)  # everything is compiled
        found = compared(alternate(entrants, scale.rounds, scale.seconds), "resident")
    step_s, input_s = 1 / found["resident"]["median"], 1 / work.alone["batches_per_s"]
    return {
        "factor": factor,
        "ahead": ahead,
        "step_s": step_s,
        "input_s": input_s,
        "headroom": step_s / input_s - 1,
        "feed_alone": work.alone,
        "batches_per_s": found,
        "au": {str(depth): found[str(depth)]["of_limit"] for depth in DEPTHS},
    }


def _rate(step, state, batches, ahead, seconds):
    """Steps per second, after a warm-up that uses up the prefetched batches."""
    state, _ = _run(step, state, batches, ahead, _WARM_UP)
    began = time.perf_counter()
    _, count = _run(step, state, batches, ahead, 1, seconds)
    return count / (time.perf_counter() - began)


def _run(step, state, batches, ahead, steps, seconds=0.0):
    """Run a training loop for at least `steps` steps and `seconds` seconds. Returns (state, number of steps).

    After each step it waits for the result of the step `ahead` steps before; at the end, for the last one.
    """
    waiting, began, count = collections.deque(), time.perf_counter(), 0
    while count < steps or time.perf_counter() - began < seconds:
        state = step(state, next(batches))
        waiting.append(state)
        if len(waiting) > ahead:
            jax.block_until_ready(waiting.popleft())
        count += 1
    return jax.block_until_ready(state), count


@functools.partial(jax.jit, static_argnums=1)
def _products(weights, products, state, batch):
    """Read the whole batch, then multiply matrices. The number of products is static; otherwise the host would
    wait for the device in each iteration, and could not run ahead."""
    read = batch.reshape(len(state), -1).max(axis=1)[:, None, None]
    state = state + read.astype(state.dtype)
    return jax.lax.fori_loop(0, products, lambda _, y: jnp.tanh(y @ weights), state)


@functools.cache
def _work(scale):
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    rows = filler(scale.data_bytes // scale.step_row * scale.step_row).reshape(-1, scale.step_row)
    batch_size = max(1, int(scale.step_mb * 1e6) // scale.step_row // len(devices)) * len(devices)
    square = np.full((len(devices), scale.width, scale.width), 1 / scale.width, np.float32)
    state = weights = jax.device_put(square.astype(scale.dtype), sharding)
    with feedline.Feed(rows, batch_size, sharding) as feed:
        batch = itertools.repeat(jax.block_until_ready(next(feed)))
        alone = measure_feed(feed, max(0.2, scale.seconds))
    step = functools.partial(_products, weights, _PROBE)
    _rate(step, state, batch, 0, 0)
    product_s = 1 / _rate(step, state, batch, 0, scale.seconds) / _PROBE
    return _Work(rows, sharding, batch_size, state, weights, alone, product_s)
