"""Host memory that JAX takes over by DLPack, on CPU devices: no copy, and kept until nothing reads it."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import pinned as module

pytestmark = pytest.mark.slow

COUNT = 8


def wait_until_released(pinned):
    """Threads of the runtime let go of the memory, perhaps a moment after what read it is done."""
    until = time.monotonic() + 30
    while pinned.in_use and time.monotonic() < until:
        time.sleep(0.0005)
    assert pinned.in_use == {}


@pytest.fixture
def pinned():
    yield module
    gc.collect()
    wait_until_released(module)  # each test lets go of everything


@pytest.fixture
def leaf(pinned):
    (leaf,) = pinned._spec(1, 1, COUNT)
    return leaf


@pytest.fixture
def slab(pinned, leaf):
    return pinned.Slab(leaf.shape[0] * leaf.shape[1], jax.devices()[0])


def test_a_global_array_lies_in_the_slab(pinned, leaf, slab):
    slab.memory[...] = np.arange(slab.memory.size) % 251
    array = pinned.global_array(slab, leaf)
    assert (array.shape, array.sharding.spec) == (leaf.shape, leaf.sharding.spec)
    np.testing.assert_array_equal(np.asarray(array).ravel(), slab.memory)
    size = slab.memory.size // COUNT
    places = [shard.data.unsafe_buffer_pointer() - slab.address for shard in array.addressable_shards]
    assert places == [i * size for i in range(COUNT)]
    assert [shard.device for shard in array.addressable_shards] == jax.devices()
    slab.memory[0] = 77
    assert int(array[0, 0]) == 77  # the same memory


def test_the_memory_is_kept_until_what_reads_it_is_done(pinned, leaf, slab):
    """As a transfer does: the array is let go of at once; the memory is written again once JAX lets go, too."""

    @jax.jit
    def later(x, steps):  # reads x after long work
        waited = jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y) + 1, jnp.full((64, 64), 0.5))
        return x + (waited.sum() * 0).astype(x.dtype)

    steps, overlapped = 2000, 0
    later(pinned.global_array(slab, leaf), steps).block_until_ready()
    for k in range(1, 21):
        slab.memory[...] = k
        array = pinned.global_array(slab, leaf)
        result = later(array, steps)
        del array
        gc.collect()
        overlapped += bool(pinned.in_use)
        steps *= 1 if overlapped else 2  # the work was done already
        wait_until_released(pinned)
        slab.memory[...] = 255
        assert np.asarray(result).min() == np.asarray(result).max() == k
    assert overlapped


def test_without_cuda_it_says_so(pinned, monkeypatch):
    monkeypatch.setattr(pinned.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    pinned._cuda_runtime.cache_clear()
    with pytest.raises(OSError, match=r"there is no libcudart.so, which registers host memory; install jax"):
        pinned._cuda_runtime()
    with pytest.raises(OSError, match="cudaHostRegister failed with CUDA's error 712"):
        pinned._check(712)
