"""A training process that is stopped, leaves early, never starts or is killed: the others end with its name.

What other tests hold is linked in docs/faults.md.
"""

import contextlib
import re
import signal
import time

import pytest
from runs import Member, await_, begun, ended

from feedline.cluster.launch import _reserved_port

pytestmark = pytest.mark.slow

HEARTBEATS_S = 15  # jax ends the others after so long without heartbeats
SLACK_S = 15  # of a loaded machine


@pytest.fixture
def run(tmp_path):
    """`run(name, each...)` starts a process for each list of arguments; None starts none."""
    with contextlib.ExitStack() as stack:

        def start(name, *each, **variables):
            folder = tmp_path / name
            folder.mkdir()
            coordinator = f"127.0.0.1:{stack.enter_context(_reserved_port())}"
            members = [
                Member(folder, i, len(each), coordinator, *arguments, **variables)
                for i, arguments in enumerate(each)
                if arguments is not None
            ]
            for member in members:
                stack.callback(member.kill)
            return members

        yield start


def test_a_process_that_stops_leaves_early_or_never_comes_is_named(run, measured):
    """Four runs at the same time, each with a fault of its own."""
    never = run("never", ["wait"], ["wait"], None, TIMEOUT_S="8")
    began_waiting = time.monotonic()
    stopped = run("stopped", ["train"], ["train"])
    stopped_0 = run("stopped_0", ["train"], ["train"])
    leaves = run("leaves", ["train"], ["train", "3"])
    begun([*stopped, *stopped_0])
    await_(lambda: stopped[0].step > 3, stopped)

    stopped[1].signal(signal.SIGSTOP)
    await_(lambda: "no answer" in stopped[0].err, stopped)
    stopped[1].signal(signal.SIGCONT)
    step = stopped[0].step
    await_(lambda: stopped[0].step > step + 3, stopped)  # it survives that
    await_(lambda: "feedline: process 1 answered again\n" in stopped[0].err, stopped)

    began = time.monotonic()
    stopped[1].signal(signal.SIGSTOP)
    stopped_0[0].signal(signal.SIGSTOP)
    ended([stopped[0], stopped_0[1]], began)
    silent = r"feedline: no answer from process {} for 4 s: .*stopped \(SIGSTOP\), swapped out or cut off from "
    assert len(re.findall(silent.format(1), stopped[0].err)) == 2
    assert re.search(silent.format(0), stopped_0[1].err)
    assert "no answer" not in stopped[1].err + stopped_0[0].err
    for member in (stopped[0], stopped_0[1]):
        assert member.code == -signal.SIGABRT
        assert member.ended_s < HEARTBEATS_S + SLACK_S
    measured("stopped", stopped[0].ended_s)
    measured("process 0 stopped", stopped_0[1].ended_s)

    ended([*leaves, *never], began_waiting)
    told = (
        "feedline: process 1 failed: it reached its end after 3 batches of a feed of which process 0 has taken 4, "
        "and each step needs all processes: look there for a loop that ends early"
    )
    assert [member.code for member in leaves] == [1, 1]
    assert all(told in member.err for member in leaves)
    assert leaves[0].step == 3
    for member in never:
        assert member.code == 1
        assert "process 2 did not come in time; look what it wrote last and whether it was started" in member.err
        assert "SIGABRT" not in member.err
