"""What the processes tell each other arrives, once and whole, from any thread."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from feedline.agreement.coordination import coordination

from .cases import case
from .launch import TOPOLOGIES, TWO_OR_FOUR
from .values import Own

pytestmark = pytest.mark.slow

PATIENCE_S = 30


def joined():
    service = coordination()
    assert service is not None
    assert (service.process, service.processes) == (jax.process_index(), jax.process_count())
    return service


@case()
def told(here):
    """What each process reads of what the others wrote."""
    service = joined()
    service.set(f"told/a/{service.process}", f"é→\n{service.process}")
    service.set(f"told/ab/{service.process}", "below another path")
    values = [service.get(f"told/a/{process}", PATIENCE_S) for process in range(service.processes)]
    return values, service.dir("told/a"), service.dir("told/a/"), service.try_get("told/a/0")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_what_one_writes_all_read(outcome, topology):
    values = [f"é→\n{process}" for process in range(topology.processes)]
    below = {f"told/a/{process}": value for process, value in enumerate(values)}
    assert outcome(topology, told) == (values, below, below, values[0])


@case()
def deleted(here):
    """A key that every process sets, deletes twice, and sets again."""
    service = joined()
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
    """What is said of keys that nobody wrote, and how long it was waited for the last."""
    service = joined()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="absent/key"):
        service.get("absent/key", timeout_s=0.5)
    return service.try_get("absent/key"), service.dir("absent"), Own(time.monotonic() - began)


def test_what_nobody_writes_is_absent(outcome):
    value, below, waited_s = outcome(TOPOLOGIES[0], absent)
    assert (value, below) == (None, {})
    assert min(waited_s) >= 0.5


@case()
def raced(here):
    """Every thread of every process writes the same key: who was told that it was the first, and its value."""
    service = joined()
    start = threading.Barrier(8)

    def write(thread):
        start.wait(PATIENCE_S)
        return service.set("raced/key", f"{service.process}.{thread}")

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(write, range(8)))
    return Own([f"{service.process}.{thread}" for thread in range(8) if first[thread]]), service.try_get(
        "raced/key"
    )


def test_the_first_value_of_a_key_stays_and_its_writer_knows(outcome):
    writers, value = outcome(TOPOLOGIES[1], raced)
    assert list(itertools.chain(*writers)) == [value]


@case()
def counted(here):
    """The values that the threads of this process saw of one counter."""
    service = joined()
    with ThreadPoolExecutor(8) as pool:
        return Own(list(pool.map(lambda i: service.increment("counted/key"), range(50))))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_no_two_increments_see_the_same(outcome, topology):
    seen = outcome(topology, counted)
    assert sorted(itertools.chain(*seen)) == list(range(1, 50 * topology.processes + 1))


@case()
def waited(here):
    """A thread waits for a key that is written by another thread, of the last process, later."""
    service = joined()
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(service.get, "waited/key", PATIENCE_S)
        service.barrier("waited/begun", PATIENCE_S)
        if service.process == service.processes - 1:
            service.set("waited/key", str(service.increment("waited/by", by=7)))
        return value.result(PATIENCE_S)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_wait_holds_up_no_other_call(outcome, topology):
    assert outcome(topology, waited) == "7"


@case()
def met(here):
    """Barriers: of all, again by the same name, of some, and one to which the last process does not come."""
    service = joined()
    for _ in range(2):
        service.increment("met/count")
        service.barrier("met/all", PATIENCE_S)
    count = service.increment("met/count", by=0)
    if service.process < 2:
        service.barrier("met/two", PATIENCE_S, [0, 1])
    if service.process != service.processes - 1:
        with pytest.raises(TimeoutError, match="met/absent"):
            service.barrier("met/absent", 1.0)
    service.barrier("met/end", PATIENCE_S)
    return count


@pytest.mark.parametrize("topology", TWO_OR_FOUR, ids=str)
def test_a_barrier_lets_pass_whoever_comes_in_time(outcome, topology):
    assert outcome(topology, met) == 2 * topology.processes


def test_there_is_none_where_nobody_joined():
    assert coordination() is None
