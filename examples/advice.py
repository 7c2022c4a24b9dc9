"""Tries common advice about JAX, and prints for each piece what happened on this machine.

python examples/advice.py

docs/benchmarks.md explains each line. Times are medians; compare only times of the same run.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH = 4096, 256


def median_us(call: Callable[[], Any], repeats: int = 21) -> float:
    """Microseconds until the result of `call` is ready, after a first call that is not measured."""
    times = []
    jax.block_until_ready(call())
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def held() -> int:
    """Bytes of all JAX arrays that are alive."""
    return sum(array.nbytes for array in jax.live_arrays())


def pinned_argument() -> str:
    try:
        jnp.array([1.0], pinned=True)  # type: ignore[call-arg]
    except TypeError:
        kinds = sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories())
        return f"no such argument; memory kinds of a device: {', '.join(kinds)}"
    return "accepted"


def in_place() -> str:
    x = jnp.zeros((ROWS, WIDTH))
    address = x.unsafe_buffer_pointer()
    outside = x.at[0].set(1.0).unsafe_buffer_pointer() == address
    donated = jax.jit(lambda x: x.at[0].set(1.0), donate_argnums=0)(x).unsafe_buffer_pointer() == address
    where = {True: "the same memory", False: "other memory"}
    return f"x.at[0].set(1) gives {where[outside]}; in a compiled step that donates x, {where[donated]}"


def donated_twice() -> str:
    x = jnp.zeros(WIDTH)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    try:
        x + 1
    except RuntimeError:
        return "the donated array is deleted; to use it again is an error, not a wrong value"
    return "the donated array can still be used"


def one_step() -> str:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(50):
            x = jnp.tanh(x) * 0.5 + x
        return x

    x, compiled = jnp.ones((8, WIDTH)), jax.jit(step)
    ratio = median_us(lambda: step(x)) / median_us(lambda: compiled(x))
    return f"150 operations one by one take {ratio:.0f} × as long as in one compiled step"


def transfers() -> str:
    device, whole = jax.devices()[0], np.ones((64, 1024), np.float32)
    rows = list(whole)
    many = median_us(lambda: [jax.device_put(row, device) for row in rows])
    tree = median_us(lambda: jax.device_put(rows, device))
    one = median_us(lambda: jax.device_put(whole, device))
    return f"256 KiB as 64 arrays take {many / one:.0f} × as long as one array, and in one call {tree / one:.0f} ×"


def asynchronous() -> str:
    x = jnp.ones((1024, 1024))
    step = jax.jit(lambda x: x @ x @ x)
    jax.block_until_ready(step(x))
    began = time.perf_counter()
    y = step(x)
    returned = time.perf_counter() - began
    jax.block_until_ready(y)
    done = time.perf_counter() - began
    return f"the call returned after {returned / done:.0%} of the time until its result was ready"


def guard() -> str:
    rows, add = np.ones(8, np.float32), jax.jit(lambda x: x + 1)
    add(jax.device_put(rows))
    with jax.transfer_guard("disallow"):
        add(jax.device_put(rows))  # explicit: allowed
        try:
            add(rows)
        except RuntimeError:
            return "a NumPy array given to a compiled step is refused; device_put before it passes"
    return "a NumPy array given to a compiled step passes"


def input_bytes() -> str:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = np.ones((ROWS, WIDTH), np.float32)
    largest = {}
    for name, spec in (("replicated", P()), ("sharded", P("data"))):
        placed = jax.device_put(rows, NamedSharding(mesh, spec))
        largest[name] = max(shard.data.nbytes for shard in placed.addressable_shards)
    return (
        f"4 MiB of input need {largest['replicated'] // 1024} KiB on each of {mesh.size} devices replicated, "
        f"{largest['sharded'] // 1024} KiB sharded"
    )


def collected() -> str:
    gc.collect()
    gc.disable()
    before = held()
    x = jnp.zeros((ROWS, WIDTH))
    jax.block_until_ready(x)
    del x
    at_once = held() == before
    cycle: list[Any] = [jnp.zeros((ROWS, WIDTH))]
    cycle.append(cycle)
    del cycle
    kept = held() > before
    gc.enable()
    gc.collect()
    freed = held() == before
    if at_once and kept and freed:
        return "an array is freed with its last reference, without it; one in a reference cycle only by it"
    return f"freed with the last reference: {at_once}; kept by a cycle: {kept}; then freed by it: {freed}"


PIECES: dict[str, Callable[[], str]] = {
    "pinned=True": pinned_argument,
    "in-place updates": in_place,
    "donation": donated_twice,
    "one compiled step": one_step,
    "fewer, larger transfers": transfers,
    "asynchronous dispatch": asynchronous,
    "transfer guard": guard,
    "sharded input": input_bytes,
    "gc.collect()": collected,
}


def tried() -> Iterator[str]:
    """A line for each piece of advice."""
    for name, piece in PIECES.items():
        yield f"{name}: {piece()}"


def main() -> None:
    for line in tried():
        print(line)


if __name__ == "__main__":
    main()
