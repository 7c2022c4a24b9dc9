"""A bottleneck that takes five times as long as the loop is named; claims/verdict.py judges the figures."""

import pytest
from planted import LOOP_S, trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", ["read", "host", "place"])
def test_the_planted_stage_binds(stage):
    report = trained(**{stage: 10 * LOOP_S}, steps=30)  # two threads share the work
    assert report.bound == stage
    assert report.wait_share > 0.5


def test_a_loop_that_sleeps_binds():
    report = trained(loop=0.05, steps=30)
    assert report.bound == "loop"
    assert report.change is None
