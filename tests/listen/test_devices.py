"""What the devices do: when transfers end, and whether steps compute, as glances at random moments find."""

import _thread
import contextlib
import queue
import random
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from background import PATIENCE_S, is_collected
from planted import ROWS, Sleeping

import feedline
from feedline._src.listen import devices
from feedline._src.listen.devices import StepWatch, TransferWatch


@jax.jit
def busy(x, turns):
    """Keeps the device busy for some time, which grows with `turns`."""
    return jax.lax.fori_loop(0, turns, lambda _, y: jnp.cos(y @ y), x)


def turns_for(seconds):
    """Turns that take at least `seconds`; the shortest of several measurements was disturbed least."""
    x, took_s = jnp.full((128, 128), 1e-3), []
    jax.block_until_ready(busy(x, 1))
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(busy(x, 20))
        took_s.append(time.perf_counter() - began)
    return max(1, int(20 * seconds / min(took_s)))


def trained(step, batches=20):
    """The report on a loop over rows in memory, after enough glances at the devices to know `idle_s`."""
    with feedline.Feed({"x": np.zeros((64, 4), np.float32)}, 8, jax.devices()[0]) as feed:
        while True:
            for _, batch in zip(range(batches), feed, strict=False):
                step(batch["x"])
            if (report := feed.report()).idle_s is not None:
                return report


@pytest.mark.slow
def test_the_devices_compute_while_a_loop_fetches_each_loss():
    """The devices are idle when the loop asks for a batch, but they computed until then."""
    turns = turns_for(0.03)
    report = trained(lambda x: float(busy(jnp.full((128, 128), 1e-3) + x[0, 0], turns)[0, 0]))
    assert report.idle_s < 0.5 * report.loop_s


@pytest.mark.slow
def test_waits_of_a_loop_that_runs_ahead_of_its_devices_are_no_waits_for_input():
    turns, x = turns_for(0.04), jnp.full((128, 128), 1e-3)
    reading = feedline.Reading(threads=1)
    with feedline.Feed(Sleeping(0.02), ROWS, jax.devices()[0], reading=reading) as feed:
        for step in range(1, 61):
            x = busy(x + next(feed)["x"][0, 0], turns)
            if step % 10 == 0:
                x.block_until_ready()
        waited_s, report = feed.statistics().wait_s / 60, feed.report()
    assert waited_s > 0.002
    assert report.wait_s < 0.5 * waited_s


@pytest.fixture
def watch():
    glances = queue.SimpleQueue()
    watch = StepWatch(glances.put)
    watch.glances = glances
    return watch


def glance_at(watch, glances, batch):
    """The next glance. Places batches meanwhile: without a recent batch, a late glance would not look."""
    for _ in range(600):
        watch.placed([batch])
        with contextlib.suppress(queue.Empty):
            return glances.get(timeout=0.05)
    raise AssertionError("no glance in 30 s")


@pytest.mark.parametrize("computes", [False, True])
def test_a_glance_sees_whether_the_devices_compute_and_its_thread_ends(computes, monkeypatch):
    step = busy(jnp.full((128, 128), 1e-3), turns_for(0.5) if computes else 0)
    if not computes:
        jax.block_until_ready(step)
    threads, batch, state = _thread._count(), jnp.zeros(2), random.getstate()
    glances = queue.SimpleQueue()
    watch = StepWatch(glances.put)
    monkeypatch.setattr(devices, "_GLANCE_FOR_S", 0.2)
    for _ in range(100):
        watch.placed([batch])
    assert _thread._count() <= threads + 1
    glance = glance_at(watch, glances, batch)
    while computes and not glance.computes:  # the glance came after the step had ended
        step = busy(step, turns_for(0.5))
        glance = glance_at(watch, glances, batch)
    assert glance.computes is computes
    assert glance.gil_wait_s >= 0
    time.sleep(0.3)
    with watch._glancing:  # wait for a glance that began in time
        while not glances.empty():
            glances.get()
    with pytest.raises(queue.Empty):  # no batch was placed recently
        glances.get(timeout=0.2)
    del watch
    while _thread._count() > threads:
        time.sleep(1e-3)
    assert random.getstate() == state  # a user may have seeded it
    jax.block_until_ready(step)


def test_a_batch_that_is_being_placed_is_no_computation_and_is_not_kept_alive(watch):
    batch = busy(jnp.full((128, 128), 1e-3), turns_for(0.3))  # as if it were in transfer
    watch.placed([batch])
    assert not glance_at(watch, watch.glances, batch).computes
    jax.block_until_ready(batch)
    alive = weakref.ref(batch)
    del batch
    assert is_collected(alive)


@pytest.mark.slow
def test_a_step_that_its_call_computes_is_no_idle_time(watch):
    """The CPU backend computes this step inside the call. Until it returns, no array shows that a step runs."""
    program = jax.jit(lambda x: jnp.linalg.svd(x)[1])
    x = np.random.default_rng(0).normal(size=(400, 400)).astype(np.float32)
    jax.block_until_ready(program(x))
    batch, latest, deadline = jnp.zeros(2), [False] * 5, time.monotonic() + 60
    while sum(latest) < 3:  # a glance may come between two steps, or while other programs have the processors
        assert time.monotonic() < deadline
        watch.placed([batch])
        jax.block_until_ready(program(x))
        while not watch.glances.empty():
            glance = watch.glances.get()
            latest = [*latest[1:], not glance.idle]


def test_python_that_holds_the_gil_is_idle_time(watch):
    batch = jnp.zeros(2)
    while watch.glances.qsize() < 12:
        watch.placed([batch])
    busy = [not watch.glances.get().idle for _ in range(12)]
    assert sum(busy) <= 6  # not 0: after a call, threads of LAPACK spin for some time


def test_transfers_are_watched_two_at_a_time_and_the_thread_ends_with_the_watch(monkeypatch):
    reports, gate, waited = queue.SimpleQueue(), threading.Event(), jax.block_until_ready

    def block(arrays):
        gate.wait()
        return waited(arrays)

    monkeypatch.setattr(jax, "block_until_ready", block)
    watch = TransferWatch(lambda transfer: reports.put(transfer[0]))
    for began in range(10):
        watch([jnp.zeros(2)], float(began))
    gate.set()
    assert [reports.get(timeout=PATIENCE_S), reports.get(timeout=PATIENCE_S)] == [0.0, 1.0]
    (thread,), alive = watch._thread._threads, weakref.ref(watch)
    del watch
    assert is_collected(alive)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_donated_batch_is_left_alone():
    reports = queue.SimpleQueue()
    watch = TransferWatch(lambda transfer: reports.put(transfer[0]))
    gone = jnp.zeros(2)
    gone.delete()
    watch([gone], 0.0)
    watch([jnp.zeros(2)], 1.0)
    assert reports.get(timeout=PATIENCE_S) == 1.0


def test_a_wait_that_fails_gives_its_permit_back(monkeypatch):
    reports, wait = queue.SimpleQueue(), jax.block_until_ready

    def fails(arrays):
        raise ValueError("not the error of a donated batch")

    watch = TransferWatch(lambda transfer: reports.put(transfer[0]))
    monkeypatch.setattr(jax, "block_until_ready", fails)
    for _ in range(devices._MAX_WATCHED):
        watch([jnp.zeros(2)], 0.0)
    watch._thread.submit(lambda: None).result(PATIENCE_S)  # the one thread has failed at all of them
    monkeypatch.setattr(jax, "block_until_ready", wait)
    watch([jnp.zeros(2)], 1.0)
    assert reports.get(timeout=PATIENCE_S) == 1.0
