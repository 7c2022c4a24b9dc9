"""The places where live buffers were allocated are those of the test's own lines."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.trainer.allocations import Place, live_buffers


def here(offset):
    """The place of the caller's line, or of one `offset` lines before it."""
    frame = inspect.currentframe().f_back
    return Place(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno - offset)


def test_each_device_has_a_buffer_of_an_array():
    before = live_buffers()
    kept = [jax.device_put(np.zeros((8, 3), np.float32), SHARDED) for _ in range(5)]
    line = here(1).line
    found = {place: count for place, count in (live_buffers() - before).items() if place.file == __file__}
    assert [(place.line, count) for place, count in found.items()] == [(line, 5 * 8)]
    del kept
    assert not [place for place in live_buffers() - before if place.file == __file__]


def test_the_result_of_a_compiled_function_is_its_callers():
    double = jax.jit(lambda x: x * 2)
    x = jnp.ones(11)
    double(x)
    before = live_buffers()
    kept = [0, 0, 0]
    for i in range(3):
        kept[i] = double(x)
    place = here(1)
    assert (live_buffers() - before)[place] == 3
    assert str(place).startswith("test_the_result_of_a_compiled_function_is_its_callers (test_allocations.py:")


SHARDED = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
