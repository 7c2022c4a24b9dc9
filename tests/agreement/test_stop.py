"""`should_stop` in one process, and the agreement of several processes on a step."""

import contextlib
import itertools
import signal
import sys
import threading

import programs
import pytest
from background import arrived, spawn
from real_service import joined

from feedline._src.agreement import stop as module
from feedline._src.agreement.stop import should_stop, stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_caught_and_the_second_acts_as_before(number, capfd):
    seen = []
    usual = signal.signal(number, lambda number, frame: seen.append(number))
    before = signal.getsignal(number)
    try:
        with stopping() as stop:
            assert not should_stop(1)
            signal.raise_signal(number)
            assert (should_stop(2), should_stop(3), stop.signal) == (True, True, number)
            signal.raise_signal(number)
            assert seen == [number]
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, usual)
    name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
    told = f"feedline: the loop ends after this step; a second {name} ends the process at once\n"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_is_not_lost(number):
    """It may come while the last checkpoint is saved."""
    with stopping() as stop:
        assert not should_stop(1)
        signal.raise_signal(number)
    assert stop.signal == number


def test_a_signal_that_is_ignored_stays_ignored():
    """A script that starts a job with `&` makes the job ignore SIGINT."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not should_stop(1)
            signal.raise_signal(signal.SIGTERM)
            assert should_stop(2)
        assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_forked_child_ends_at_its_first_signal():
    program = (
        "import os, signal\n"
        "from feedline.cluster import should_stop\n"
        "should_stop(1)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), should_stop(2))"
    )
    done = programs.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "-15 False\n")


@pytest.mark.parametrize("step", [3.0, "3", None, -1])
def test_a_step_that_is_no_number_of_a_step_is_refused_before_a_signal_comes(step):
    """Raised later, the error would end the thread for which all processes wait."""
    with stopping(), pytest.raises((TypeError, ValueError), match="step must be "):
        should_stop(step)


def test_the_first_call_needs_the_main_thread():
    with pytest.raises(RuntimeError, match=r"main thread alone, .* call it once in the main thread"):
        spawn(lambda: should_stop(1)).result()


@pytest.fixture
def stops(monkeypatch):
    """`stops(n)`: the `Stop` objects of n processes, all in this process."""
    with contextlib.ExitStack() as stack:

        def make(processes):
            made = []
            for service in stack.enter_context(joined(processes)):
                monkeypatch.setattr(module, "coordination", lambda service=service: service)
                monkeypatch.setattr(module, "counted", lambda kind, processes: f"feedline/{kind}/1")
                made.append(module.Stop())
                stack.callback(made[-1].close)
            return made

        yield make


def step_of(stop, first, every=1):
    """The first step, from `first` on, at which `reached` returns True."""
    return next(step for step in itertools.count(first, every) if stop.reached(step))


@pytest.mark.parametrize("every", [1, 10])
def test_processes_at_different_steps_stop_at_the_same_step(stops, every):
    """Also if they call `reached` only at every tenth step."""
    all_of_them = stops(3)
    for at, stop in zip((10, 40, 20), all_of_them, strict=True):
        for step in range(0, at + 1, every):
            assert not stop.reached(step)
    all_of_them[2]._handle(signal.SIGTERM, None)
    steps = [spawn(lambda stop=stop, at=at: step_of(stop, at + every, every))
             for stop, at in zip(all_of_them, (10, 40, 20), strict=True)]  # fmt: skip
    found = {step.result(30) for step in steps}
    assert len(found) == 1
    assert found.pop() >= 41
    assert {stop.signal for stop in all_of_them} == {signal.SIGTERM}


def test_a_process_whose_loop_has_ended_does_not_block_the_others(stops):
    first, last = stops(2)
    first.reached(99)
    first.close()
    last.reached(98)
    last._handle(signal.SIGTERM, None)
    assert spawn(lambda: step_of(last, 99)).result(30) >= 100


def test_a_signal_after_the_last_step_is_told_to_those_that_still_save(stops):
    early, signalled, late = stops(3)
    for stop in (early, signalled, late):
        assert not stop.reached(9)
    early.close()
    signalled._handle(signal.SIGTERM, None)
    signalled.close()
    late.close()
    assert (early.signal, signalled.signal, late.signal) == (None, signal.SIGTERM, signal.SIGTERM)


def test_a_process_that_does_not_call_should_stop_is_named(stops, monkeypatch):
    late, warned, told = threading.Event(), threading.Event(), []
    agree = module.Stop._agree
    monkeypatch.setattr(module, "_WARN_S", 0.01)
    monkeypatch.setattr(module._log, "warning", lambda *message: (told.append(message), warned.set()))
    monkeypatch.setattr(
        module.Stop, "_agree", lambda self, service: (service.process or arrived(late), agree(self, service))
    )
    _, last = stops(2)
    last.reached(1)
    last._handle(signal.SIGTERM, None)
    stopped = spawn(lambda: step_of(last, 2))
    arrived(warned)
    late.set()
    assert stopped.result(30) >= 2
    assert told[0][1] == "process 0"
