"""Does pmap replicate the function? What a Python loop inside pmap costs, and what to write instead.

python examples/loop_in_pmap.py

Compiles the gradient of a sum over many blocks of rows. For each form, the compiler reports what a device needs:

  replicated   in_axes=None: every device gets all rows, and loops in Python over its own. Tracing unrolls the
               loop, so each block is compiled separately, and its intermediate results are kept for the gradient
  sharded      in_axes=0: every device gets only its own rows
  scan         like sharded, with lax.scan as the loop: the block is compiled once
  remat        like scan, with jax.checkpoint of the block: its results are computed again for the gradient
  map          lax.map with batch_size, which cuts the blocks itself, and with jax.checkpoint

So pmap replicates an input that is not mapped, and a Python loop repeats the program. With the last two forms,
only a device's own rows grow with the number of blocks.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WIDTH, BLOCK = 64, 32
AXIS = "data"


class Figures(NamedTuple):
    """What a compiled program needs on one device, in bytes, and how long compiling took, in seconds."""

    argument: int
    temporary: int
    program: int  # the length of its text, since not every backend reports the size of its code
    compile_s: float


def layers(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """An expensive function of some rows: its intermediate results are needed for the gradient."""
    for weight in weights:
        rows = jnp.tanh(rows @ weight)
    return rows.sum()


def blocks(rows: jax.Array) -> jax.Array:
    return rows.reshape(-1, BLOCK, rows.shape[-1])


def in_python(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """A Python loop: unrolled."""
    return sum((layers(weights, block) for block in blocks(rows)), start=jnp.zeros(()))


def in_scan(function: Callable[..., jax.Array], weights: jax.Array, rows: jax.Array) -> jax.Array:
    total, _ = jax.lax.scan(lambda total, block: (total + function(weights, block), None), 0.0, blocks(rows))
    return total


def in_map(weights: jax.Array, rows: jax.Array) -> jax.Array:
    one = jax.checkpoint(lambda row: layers(weights, row))
    return jax.lax.map(one, rows, batch_size=BLOCK).sum()


def in_python_over_own(weights: jax.Array, all_rows: jax.Array) -> jax.Array:
    """A Python loop over the rows of this device, which it cuts from all rows."""
    count = all_rows.shape[0] // jax.device_count()
    return in_python(weights, jax.lax.dynamic_slice_in_dim(all_rows, jax.lax.axis_index(AXIS) * count, count))


def forms() -> dict[str, tuple[Callable[..., Any], int | None]]:
    """{form: (function that sums over this device's rows, in_axes of the rows)}."""
    return {
        "replicated": (in_python_over_own, None),
        "sharded": (in_python, 0),
        "scan": (functools.partial(in_scan, layers), 0),
        "remat": (functools.partial(in_scan, jax.checkpoint(layers)), 0),
        "map": (in_map, 0),
    }


def figures(form: str, loops: int) -> Figures:
    """Compile the gradient of a form, for `loops` blocks on each device. Nothing is run or allocated."""
    function, axis = forms()[form]
    devices = jax.device_count()
    rows = loops * BLOCK
    shape = (rows * devices, WIDTH) if axis is None else (devices, rows, WIDTH)
    gradient = jax.pmap(
        # `device` is there because pmap needs at least one mapped argument
        lambda weights, rows, device: jax.lax.psum(jax.grad(function)(weights, rows), AXIS),
        axis_name=AXIS,
        in_axes=(None, axis, 0),
        out_axes=None,
    )
    arguments = [
        jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((devices,), jnp.int32),
    ]
    began = time.perf_counter()
    compiled = gradient.lower(*arguments).compile()
    compile_s = time.perf_counter() - began
    memory = compiled.memory_analysis()
    return Figures(memory.argument_size_in_bytes, memory.temp_size_in_bytes, len(compiled.as_text()), compile_s)


def main() -> None:
    few, many = 4, 16
    print(
        f"KiB on each of {jax.device_count()} devices, {few} → {many} blocks of {BLOCK} rows; seconds for {many}"
    )
    print("form            arguments       temporary         program   compile")
    for form in forms():
        of_few, of_many = figures(form, few), figures(form, many)
        sizes = (f"{a // 1024} → {b // 1024}" for a, b in zip(of_few[:3], of_many[:3], strict=True))
        print(f"{form:10}" + "".join(f"{size:>16}" for size in sizes) + f"{of_many.compile_s:10.2f}")


if __name__ == "__main__":
    main()
