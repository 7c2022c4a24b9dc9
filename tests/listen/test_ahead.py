"""A loop that runs ahead of its devices: while it waits for a batch and they compute, nobody waits for input."""

import _thread
import gc
import math
import queue
import random
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_accounting import delivered

import feedline
from feedline._src.listen.accounting import Accounting
from feedline._src.listen.devices import Look, StepWatch
from feedline._src.listen.window import Window


@jax.jit
def busy(x, turns):
    """Keeps the device busy for some time, which grows with `turns`."""
    return jax.lax.fori_loop(0, turns, lambda _, y: jnp.cos(y @ y), x)


def turns_for(seconds):
    x = jnp.full((128, 128), 1e-3)
    jax.block_until_ready(busy(x, 1))
    began = time.perf_counter()
    jax.block_until_ready(busy(x, 100))
    return max(1, int(100 * seconds / (time.perf_counter() - began)))


def test_time_in_which_devices_compute_is_no_waiting():
    accounting = Accounting(ahead=-2)
    for step in range(1, 5):
        accounting.looked(Look(step + 0.1, step + 0.2, step + 0.4 if step % 2 else None))
        delivered(accounting, step, step + 0.5)
    batches = accounting.latest()
    assert [batch.computed_s for batch in batches] == pytest.approx([0.4, 0.5, 0.4, 0.5])
    window = Window.of(batches)
    assert window.wait_s == pytest.approx(0.05)
    assert window.period_s == pytest.approx((0.0 + 3 * 0.5) / 4 + 0.5)  # as before: the first loop is not known
    assert [batch.loop_s for batch in window.batches] == pytest.approx([0.4, 1.0, 0.9, 1.0])


def test_waits_that_nobody_looked_at_count_as_the_others():
    accounting = Accounting(ahead=-2)
    for step in range(1, 9):
        if step == 3:
            accounting.looked(Look(3.0, 3.1, 3.1))  # idle
        if step == 6:
            accounting.looked(Look(6.0, 6.1, None))
        delivered(accounting, step, step + 0.4)
    assert Window.of(accounting.latest()).wait_s == pytest.approx((0.3 + 0.0 + 6 * 0.4 * (1 - 0.5 / 0.8)) / 8)


@pytest.mark.parametrize("look", [Look(0.5, 0.6, 0.7), Look(2.0, 2.6, None), Look(9.0, 9.1, None)])
def test_a_look_at_another_time_says_nothing_about_a_wait(look):
    accounting = Accounting(ahead=-2)
    accounting.looked(look)
    delivered(accounting, 2.0, 2.5)
    assert accounting.latest()[0].computed_s is None


def trained(step):
    """The report on a loop over rows in memory, once there were some glances."""
    with feedline.Feed({"x": np.zeros((64, 4), np.float32)}, 8, jax.devices()[0]) as feed:
        while True:
            for _, batch in zip(range(20), feed, strict=False):
                step(batch["x"])
            if (report := feed.report()).idle_s is not None:
                return report


@pytest.mark.slow
def test_a_loop_that_sleeps_longer_than_its_steps_take_is_limited_by_its_python():
    def step(x):
        float(x.sum())
        time.sleep(0.03)

    report = trained(step)
    assert report.bound == "loop"
    assert report.au < 0.4
    assert report.idle_s > 0.5 * report.loop_s


@pytest.mark.slow
def test_a_loop_that_fetches_each_loss_is_limited_by_compute():
    """The devices are idle whenever it asks for a batch: they have computed until then."""
    turns = turns_for(0.03)
    report = trained(lambda x: float(busy(jnp.full((128, 128), 1e-3) + x[0, 0], turns)[0, 0]))
    assert report.bound == "compute"
    assert report.idle_s < 0.5 * report.loop_s


@pytest.fixture
def watch():
    watch = StepWatch(lambda look: watch.looks.put(look), lambda at, idle: watch.glances.put(idle))
    watch.looks, watch.glances = queue.SimpleQueue(), queue.SimpleQueue()
    return watch


def test_a_batch_that_is_being_placed_is_no_computation(watch):
    batch = busy(jnp.full((128, 128), 1e-3), turns_for(0.2))  # as if it were in transfer
    watch.placed([batch])
    watch.waits()
    look = watch.looks.get(timeout=10)
    assert look.idle == look.asked
    jax.block_until_ready(batch)


def test_a_step_is_seen_until_it_is_ready(watch):
    turns = turns_for(0.4)
    step = busy(jnp.full((128, 128), 1e-3), turns)
    watch.waits()
    look = watch.looks.get(timeout=10)
    assert look.idle is None
    while not step.is_ready():
        computes = time.perf_counter()
        time.sleep(1e-3)
    while look.idle is None:
        time.sleep(1e-3)
    assert computes <= look.idle <= time.perf_counter()


def test_arrays_that_are_donated_meanwhile_are_let_go(watch):
    step = busy(jnp.full((128, 128), 1e-3), turns_for(0.2))
    watch.waits()
    watch.looks.get(timeout=10)
    step.delete()
    while watch._due == math.inf:
        time.sleep(1e-3)


def test_it_looks_once_at_a_time_and_not_too_often(watch):
    for _ in range(100):
        watch.waits()
    watch.looks.get(timeout=10)
    time.sleep(0.05)
    assert watch.looks.empty() or time.perf_counter() > watch._due - 0.03
    assert watch.looks.qsize() <= 1


def test_each_look_ends_its_thread_and_keeps_nothing_alive(watch):
    threads = _thread._count()
    watch.waits()
    watch.looks.get(timeout=10)
    while _thread._count() > threads:
        time.sleep(1e-3)
    arrays = [jnp.zeros(2)]
    alive = weakref.ref(arrays[0])
    watch.placed(arrays)
    arrays.clear()
    gc.collect()
    assert alive() is None


def test_a_machine_that_starts_no_more_threads_ends_no_training(watch, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    watch.waits()
    watch.waits()
    assert watch.looks.empty()


def test_the_generator_of_the_module_random_is_left_alone(watch):
    """A user may have seeded it."""
    state = random.getstate()
    watch.waits()
    watch.looks.get(timeout=10)
    while watch._due == math.inf:
        time.sleep(1e-3)
    assert random.getstate() == state


@pytest.mark.parametrize("computes", [False, True])
def test_a_glance_sees_whether_the_devices_compute(watch, computes):
    step = busy(jnp.full((128, 128), 1e-3), turns_for(0.5) if computes else 0)
    if not computes:
        jax.block_until_ready(step)
    batch = jnp.zeros(2)
    watch.placed([batch])
    assert watch.glances.empty()
    watch.placed([batch])
    assert watch.glances.get(timeout=10) == (not computes)
    jax.block_until_ready(step)


def test_one_glance_is_awaited_at_a_time_and_each_ends_its_thread(watch):
    threads, batch = _thread._count(), jnp.zeros(2)
    for _ in range(100):
        watch.placed([batch])
    assert _thread._count() <= threads + 1
    watch.glances.get(timeout=10)
    assert watch.glances.qsize() <= 1
    while _thread._count() > threads:
        time.sleep(1e-3)


@pytest.mark.slow
def test_a_step_that_its_call_computes_is_no_idle_time(watch):
    """The CPU backend computes it on the calling thread, and it has no arrays until then."""
    program = jax.jit(lambda x: jnp.linalg.svd(x)[1])
    x = np.random.default_rng(0).normal(size=(400, 400)).astype(np.float32)
    jax.block_until_ready(program(x))
    batch, latest, deadline = jnp.zeros(2), [True] * 5, time.monotonic() + 60
    while sum(latest) > 2:  # a glance may come between two steps, or while other programs have the processors
        assert time.monotonic() < deadline
        watch.placed([batch])
        jax.block_until_ready(program(x))
        while not watch.glances.empty():
            latest = [*latest[1:], watch.glances.get()]


def test_python_that_holds_the_gil_is_idle_time(watch):
    batch = jnp.zeros(2)
    while watch.glances.qsize() < 12:
        watch.placed([batch])
    assert sum(watch.glances.get() for _ in range(12)) >= 6  # threads of LAPACK spin for some time after a call
