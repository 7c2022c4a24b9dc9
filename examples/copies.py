"""Do copies leak? What a list of copies, an accumulating sum and a donated sum hold on the device.

python examples/copies.py

A JAX array is freed when nothing refers to it. So a list of copies holds all of them, a sum that replaces itself
holds one array, and a donated argument gives its memory to the result.
"""

import functools

import jax
import jax.numpy as jnp

COPIES = 1000
SHAPE = (256, 64)  # 64 KiB


def held() -> int:
    """Bytes of all JAX arrays that are alive in this process."""
    return sum(array.nbytes for array in jax.live_arrays())


def list_of_copies(x: jax.Array) -> int:
    """Bytes held at the end by a list of copies of `x`, beside `x`."""
    before = held()
    copies = [jnp.copy(x) for _ in range(COPIES)]
    jax.block_until_ready(copies)
    return held() - before


def accumulating_sum(x: jax.Array) -> tuple[int, int]:
    """Bytes held at the end by `total = total + x`, and the most during any step, beside `x`."""
    before, most = held(), 0
    total = jnp.zeros_like(x)
    for _ in range(COPIES):
        previous, total = total, total + x  # both exist until `previous` is replaced
        most = max(most, held() - before)
    del previous
    return held() - before, most


@functools.partial(jax.jit, donate_argnums=0)
def summed(total: jax.Array, x: jax.Array) -> jax.Array:
    """Add `x` to `total` COPIES times, in one program and in the memory of `total`."""
    return jax.lax.fori_loop(0, COPIES, lambda _, total: total + x, total)


def donated_sum(x: jax.Array) -> tuple[int, bool]:
    """Bytes held at the end by a donated sum, beside `x`; and whether the sum has the memory of the argument."""
    before = held()
    total = jnp.zeros_like(x)
    address = total.unsafe_buffer_pointer()
    total = summed(total, x)
    jax.block_until_ready(total)
    return held() - before, total.unsafe_buffer_pointer() == address


def main() -> None:
    x = jnp.ones(SHAPE)
    size = x.nbytes
    print(f"{COPIES} times an array of {size // 1024} KiB; held beside it:")
    print(f"a list of copies          {list_of_copies(x) // size:5} arrays")
    at_end, most = accumulating_sum(x)
    print(f"total = total + x         {at_end // size:5} array, at most {most // size}")
    at_end, in_place = donated_sum(x)
    where = "in the same memory" if in_place else "in other memory"
    print(f"fori_loop, total donated  {at_end // size:5} array, {where}")


if __name__ == "__main__":
    main()
