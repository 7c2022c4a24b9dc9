"""`feedline bench practices`: each practice is measured on and off, and the compiler sees the difference."""

import pytest

from feedline._src.tools.bench import practices
from feedline._src.tools.bench.workload import Workload

TINY = Workload(depth=4, width=32, inputs=16, outputs=4, rows=64)
PAIRS = practices.pairs(TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "less"),
    [
        ("donate_state", "off", "on"),
        ("shard_state", "off", "on"),
        ("ship_uint8", "off", "on"),
        ("steps_per_call", "on", "off"),
    ],
)
def test_the_compiler_sees_the_difference_in_memory(name, more, less):
    found = practices.measured(PAIRS[name], 2, 0.01)
    for which in ("on", "off"):
        figures = found[which]
        assert figures["step_ms"] > 0
        assert len(figures["step_ms_samples"]) == 2
    assert found["ratios"] == sorted(found["ratios"])
    assert found[more]["compiled_bytes"]["total"] > found[less]["compiled_bytes"]["total"]
