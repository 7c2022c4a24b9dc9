"""A training process that is stopped, leaves early, never starts or is killed: the others end and name it.

docs/faults.md links the tests of other faults.
"""

import contextlib
import re
import signal
import time

import pytest
from runs import Member, await_, begun, ended

from feedline._src.tools.launch import reserved_port

pytestmark = pytest.mark.nightly

HEARTBEATS_S = 15  # after so long without heartbeats of one process, jax ends the others
SLACK_S = 15  # more, on a loaded machine


@pytest.fixture
def run(tmp_path):
    """`run(name, each...)` starts a process for each list of arguments; None starts none."""
    with contextlib.ExitStack() as stack:

        def start(name, *each, **variables):
            folder = tmp_path / name
            folder.mkdir()
            coordinator = f"127.0.0.1:{stack.enter_context(reserved_port())}"
            members = [
                Member(folder, i, len(each), coordinator, *arguments, **variables)
                for i, arguments in enumerate(each)
                if arguments is not None
            ]
            for member in members:
                stack.callback(member.kill)
            return members

        yield start


def test_a_process_that_stops_or_never_comes_is_named(run, measured):
    """Three runs at the same time, each with a fault of its own."""
    never = run("never", ["wait"], ["wait"], None, TIMEOUT_S="60")
    began_waiting = time.monotonic()
    stopped = run("stopped", ["train"], ["train"], ["train"])
    stopped_0 = run("stopped_0", ["train"], ["train"])
    begun([*stopped, *stopped_0])
    waits, still, waits_too = stopped

    still.signal(signal.SIGSTOP)
    await_(lambda: "no answer" in waits.err and "no answer" in waits_too.err, stopped)
    still.signal(signal.SIGCONT)
    step = waits.step
    await_(lambda: waits.step > step + 3, stopped)  # a short stop ends no process
    again = "feedline: process 1 answered again\n"
    await_(lambda: again in waits.err and again in waits_too.err, stopped)

    began = time.monotonic()
    still.signal(signal.SIGSTOP)
    stopped_0[0].signal(signal.SIGSTOP)
    survivors = [waits, waits_too, stopped_0[1]]
    ended(survivors, began)
    silent = r"feedline: no answer from process {} for 4 s: .*stopped \(SIGSTOP\), swapped out or cut off from "
    *told, other = [len(re.findall(silent.format(1), member.err)) for member in survivors]
    assert (sorted(told) in ([1, 2], [2, 2]), other) == (True, 0)  # one may end before it reports the second stop
    assert re.search(silent.format(0), stopped_0[1].err)
    assert "no answer" not in still.err + stopped_0[0].err
    for member in survivors:
        assert member.code in (-signal.SIGABRT, 1)  # 1: another survivor ended first, so its collective failed
        assert member.ended_s < HEARTBEATS_S + SLACK_S
    measured("it stops for ever (SIGSTOP), or is swapped out", max(waits.ended_s, waits_too.ended_s))
    measured("process 0 stops for ever", stopped_0[1].ended_s)

    ended(never, began_waiting)
    for member in never:
        assert member.code == 1
        assert "process 2 did not arrive in time, or ended too early; read their logs" in member.err
        assert "SIGABRT" not in member.err


def test_a_process_that_ends_early_raises_or_is_killed_is_named(run, measured):
    """Six runs: in one a process leaves early, in two it raises, in three it is killed."""
    killed = {  # {fault: (the process that is killed, the run)}
        "it is killed while others wait in a collective over Gloo": (
            1,
            run("in a collective", ["train"], ["train"]),
        ),
        "it is killed": (1, run("asleep", ["wait"], ["wait"])),
        "process 0 is killed": (0, run("process 0", ["wait"], ["wait"])),
    }
    leaves = run("leaves", ["train"], ["train", "3"])
    await_(lambda: leaves[1].step == 3, leaves)
    seconds = others_end(leaves, [0, 1])
    measured("it leaves the loop early, by `break` or `sys.exit(1)`, while others take more batches", seconds)
    told = (
        "feedline: process 1 failed: it reached its end after 3 batches of a feed, but process 0 has taken 4, "
        "and each step needs all processes: look there for a loop that ends early"
    )
    assert all(told in member.err for member in leaves)
    assert [member.code for member in leaves] == [1, 1]
    assert leaves[0].step == 3

    for odd, name in enumerate(("process 0 raises", "it raises")):
        members = run(name, *(["train", "3", "raise"] if i == odd else ["train"] for i in range(2)))
        other = members[1 - odd]
        await_(lambda: members[odd].step == 3, members)  # noqa: B023
        measured(name, others_end(members, [1 - odd]))
        assert f"feedline: process {odd} failed: ArithmeticError: as it was told to\n" in other.err
        assert other.code == 1

    for odd, members in killed.values():
        begun(members)
        members[odd].signal(signal.SIGKILL)
    ended([member for _, members in killed.values() for member in members], time.monotonic())
    for name, (odd, members) in killed.items():
        other = members[1 - odd]
        measured(name, other.ended_s)
        assert other.ended_s < HEARTBEATS_S + SLACK_S
        assert f"no answer from process {odd}" in other.err or "slice 0 task 0" in other.err
        assert other.code in (-signal.SIGABRT, 1)


def others_end(members, others):
    """Wait until all have ended. Returns the seconds until the last of `others` had ended."""
    ended(members, time.monotonic())
    seconds = max(members[other].ended_s for other in others)
    assert seconds < HEARTBEATS_S + SLACK_S
    return seconds
