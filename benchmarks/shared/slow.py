"""Stand-ins for slow storage and for a training step: loads that sleep, and computations of a given time."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np


class Slow:
    """A source whose reads sleep, as if they waited for a disk or a network. They use no CPU.

    Each `every`-th call sleeps `seconds`, or `seconds` per `rows` rows. With `cached`, only new rows count.
    """

    identity = {"kind": "slow"}  # noqa: RUF012

    def __init__(self, seconds, shape=(64,), rows=None, every=1, cached=False):
        self.spec = jax.ShapeDtypeStruct(shape, np.float32)
        self.seconds, self.rows, self.every, self.cached = seconds, rows, every, cached
        self._calls, self._seen = 0, set()

    def __len__(self):
        return 1 << 20

    def read(self, rows, out):
        self._calls += 1
        new = [row for row in rows.tolist() if row not in self._seen]
        if self.cached:
            self._seen.update(new)
        if self._calls % self.every == 0:
            time.sleep(self.seconds * (len(new) / self.rows if self.rows else 1))
        out[...] = 1

    def close(self):
        pass


def computation(x, step_s):
    """A jitted function of arrays like x that keeps the devices busy for about `step_s` seconds."""

    @jax.jit
    def computed(x, count):
        return jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y), x)

    computed(x, jnp.int32(1)).block_until_ready()
    count = 1000
    while (took := timed(lambda: computed(x, jnp.int32(count)))) < step_s / 2:  # noqa: B023
        count *= 2
    return functools.partial(computed, count=jnp.int32(count * step_s / took))


def timed(call):
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began
