"""Ctrl-C: it is never lost, it is delayed during imports, and it ends training cleanly."""

import signal
import subprocess
import sys
import threading
import time

import programs
import pytest

from feedline._src.tools.cli.interrupt import (
    Terminated,
    interrupts_get_through,
    interrupts_wait,
    terminations_raise,
)

LONG_S = 60


class Finalized:
    """Calls a function when it is freed."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __del__(self):
        self.call(*self.arguments)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupt_in_a_finalizer_gets_through(number, error):
    never = threading.Event()
    with pytest.raises(error), interrupts_get_through(), terminations_raise():  # noqa: PT012  the finalizer comes first
        Finalized(signal.raise_signal, number)
        never.wait(LONG_S)
        pytest.fail("the interrupt was lost")


def test_an_interrupt_gets_through_though_the_hook_stands_still(monkeypatch):
    set_timer, never, waits_s = signal.setitimer, threading.Event(), iter([0.1])

    def set_and_stand_still(which, seconds):
        set_timer(which, seconds)
        time.sleep(next(waits_s, 0))

    monkeypatch.setattr(signal, "setitimer", set_and_stand_still)
    with pytest.raises(KeyboardInterrupt), interrupts_get_through():  # noqa: PT012
        Finalized(signal.raise_signal, signal.SIGINT)
        never.wait(LONG_S)
        pytest.fail("the interrupt was lost")


def test_a_signal_that_is_ignored_or_handled_stays_so():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminations_raise():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_an_interrupt_is_delayed():
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the point is where it is raised
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")
        reached.append("beyond it")
    assert reached == ["the end of the block"]


@pytest.mark.slow
def test_ctrl_c_ends_training_with_a_line():
    endless = ["train", "--cpu-devices", "2", "--steps", "1000000000"]
    with programs.started(
        [sys.executable, "-m", "feedline", *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as training:
        assert any(line.startswith("step 1 of 1,000,000,000 | loss ") for line in training.stderr)
        training.send_signal(signal.SIGINT)
        out, err = training.communicate(timeout=120)
    told = [line for line in err.splitlines() if not line.startswith("step ")]  # there is one every ten seconds
    assert (training.returncode, out, told) == (130, "", ["feedline: interrupted"])


@pytest.mark.slow
def test_ctrl_c_while_jax_is_imported_is_as_clean(measured):
    with programs.started(
        [sys.executable, "-v", "-m", "feedline", "train", "--steps", "1000000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        assert any(line.startswith("import 'jaxlib'") for line in training.stderr)
        training.send_signal(signal.SIGINT)
        began = time.monotonic()
        err = training.communicate(timeout=120)[1]
    measured("Ctrl-C in `feedline train`", time.monotonic() - began)
    assert training.returncode == 130
    assert "feedline: interrupted\n" in err
    assert "Traceback" not in err
