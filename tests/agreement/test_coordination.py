"""Keys of the coordination service: several processes set, read, delete and compare their values."""

import time

import pytest
from background import PATIENCE_S
from real_service import joined

from feedline._src.agreement.coordination import Comparison, coordination

PROCESSES = 3


@pytest.fixture(scope="module")
def services():
    with joined(PROCESSES) as services:
        yield services


def test_every_process_reads_what_each_writes_below_exactly_that_path(services):
    for service in services:
        service.set(f"told/a/{service.process}", f"é→\n{service.process}")
        service.set(f"told/ab/{service.process}", "below another path")
    values = [f"é→\n{process}" for process in range(PROCESSES)]
    below = {f"told/a/{process}": value for process, value in enumerate(values)}
    for service in services:
        assert [service.get(key, PATIENCE_S) for key in below] == values
        assert service.dir("told/a") == service.dir("told/a/") == below
        assert service.try_get("told/a/0") == values[0]
        assert service.by_process("told/a") == dict(enumerate(values))


def test_a_key_without_a_value_is_absent(services):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="absent/key"):
        services[1].get("absent/key", timeout_s=0.5)
    assert time.monotonic() - began > 0.4  # not 0.5: the service has another clock
    assert services[1].try_get("absent/key") is None
    assert services[1].dir("absent") == services[1].by_process("absent") == {}


def test_of_two_values_at_a_key_the_later_is_compared_and_few_stay(services):
    one, other = Comparison(services[0], kept=2), Comparison(services[1], kept=2)
    for step in range(5):
        assert one.differing(f"compared/{step}", [step, "é"]) is None
    assert len(services[0].dir("compared")) == 2
    assert other.differing("compared/4", (4, "é")) is None
    assert other.differing("compared/4", [5, "é"]) == (0, [4, "é"])


def test_there_is_no_coordination_service_without_joining():
    assert coordination() is None
