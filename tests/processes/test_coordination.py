"""Keys and counters of the coordination service, from several processes and threads."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from feedline._src.agreement.coordination import coordination

from .cases import case
from .launch import TOPOLOGIES
from .meeting import meet
from .values import PerProcess

pytestmark = pytest.mark.slow

PATIENCE_S = 30


def joined_service():
    service = coordination()
    assert service is not None
    assert (service.process, service.processes) == (jax.process_index(), jax.process_count())
    return service


@case()
def told(here):
    """What each process reads of what the others wrote."""
    service = joined_service()
    service.set(f"told/a/{service.process}", f"é→\n{service.process}")
    service.set(f"told/ab/{service.process}", "below another path")
    values = [service.get(f"told/a/{process}", PATIENCE_S) for process in range(service.processes)]
    return values, service.dir("told/a"), service.dir("told/a/"), service.try_get("told/a/0")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_process_reads_what_one_writes(outcome, topology):
    values = [f"é→\n{process}" for process in range(topology.processes)]
    below = {f"told/a/{process}": value for process, value in enumerate(values)}
    assert outcome(topology, told) == (values, below, below, values[0])


@case()
def numbered(here):
    """What all processes wrote below a path, by the number with which each key ends."""
    service = joined_service()
    for name in ("a", "b", "ab"):
        service.set(f"numbered/{name}/{service.process}", f"{name} of {service.process}")
    meet("numbered")
    return service.by_process("numbered/a"), service.by_process("numbered/absent")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_values_by_process(outcome, topology):
    assert outcome(topology, numbered) == ({i: f"a of {i}" for i in range(topology.processes)}, {})


@case()
def deleted(here):
    """A key that every process sets, deletes twice, and sets again."""
    service = joined_service()
    key = f"deleted/{service.process}"
    first = service.set(key, "1")
    service.delete(key)
    service.delete(key)
    gone = service.try_get(key)
    return first, gone, service.set(key, "2"), service.get(key, PATIENCE_S)


def test_a_key_that_was_deleted_can_be_set_again(outcome):
    assert outcome(TOPOLOGIES[0], deleted) == (True, None, True, "2")


@case()
def absent(here):
    """The results for keys that no process wrote, and how long `get` waited."""
    service = joined_service()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="absent/key"):
        service.get("absent/key", timeout_s=0.5)
    return service.try_get("absent/key"), service.dir("absent"), PerProcess(time.monotonic() - began)


def test_a_key_without_a_value_is_absent(outcome):
    value, below, waited_s = outcome(TOPOLOGIES[0], absent)
    assert (value, below) == (None, {})
    assert min(waited_s) >= 0.5


@case()
def raced(here):
    """Every thread of every process writes the same key. The threads that were the first, and the value."""
    service = joined_service()
    start = threading.Barrier(8)

    def write(thread):
        start.wait(PATIENCE_S)
        return service.set("raced/key", f"{service.process}.{thread}")

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(write, range(8)))
    return PerProcess([f"{service.process}.{thread}" for thread in range(8) if first[thread]]), service.try_get(
        "raced/key"
    )


def test_the_first_value_of_a_key_stays_and_set_returns_true_for_it(outcome):
    writers, value = outcome(TOPOLOGIES[1], raced)
    assert list(itertools.chain(*writers)) == [value]


@case()
def counted(here):
    """The values that the threads of this process saw of one counter."""
    service = joined_service()
    with ThreadPoolExecutor(8) as pool:
        return PerProcess(list(pool.map(lambda i: service.increment("counted/key"), range(50))))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_increments_are_atomic(outcome, topology):
    seen = outcome(topology, counted)
    assert sorted(itertools.chain(*seen)) == list(range(1, 50 * topology.processes + 1))


@case()
def waited(here):
    """A thread waits for a key that is written by another thread, of the last process, later."""
    service = joined_service()
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(service.get, "waited/key", PATIENCE_S)
        meet("waited")
        if service.process == service.processes - 1:
            service.set("waited/key", str(service.increment("waited/by", by=7)))
        return value.result(PATIENCE_S)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_wait_does_not_block_other_calls(outcome, topology):
    assert outcome(topology, waited) == "7"


def test_there_is_no_coordination_service_without_joining():
    assert coordination() is None
