"""The failure of one process ends the others, whatever they wait for; a normal end does not."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
from real_service import joined

from feedline import ProcessError
from feedline._src.agreement import monitor
from feedline._src.agreement.monitor import blamed_process
from feedline._src.tools.launch import reserved_port

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("failing.py")
ABORT_AFTER_S = 0.5
PROMISED_S = 25.0  # all processes end at most this long after `abort_after_s`, even on a busy machine
DEADLINE_S = 60
FAIL = ("raises", "hooked", "unreadable", "exits")
ENDS = ("works", "works_on", "ends", "leaves", "waits_no_longer")
ENVIRON = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
BY_JAX = {**ENVIRON, "JOINED_BY_JAX": "1"}


class Ended:
    """Exit code and output of each process, and the time from the failure to the end of the last process."""

    def __init__(self, codes, out, err, took_s):
        self.codes, self.out, self.err, self.took_s = codes, out, err, took_s


def run_roles(tmp_path, *roles, abort_after_s=ABORT_AFTER_S, environ=ENVIRON):
    """Runs one process for each role; processes that fail do so once the others wait."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        processes = []
        for index, role in enumerate(roles):
            of_this = {
                "FEEDLINE_COORDINATOR": f"127.0.0.1:{port}",
                "FEEDLINE_PROCESSES": str(len(roles)),
                "FEEDLINE_PROCESS": str(index),
            }
            err = stack.enter_context((tmp_path / f"{index}.err").open("w"))
            process = stack.enter_context(
                programs.started(
                    [sys.executable, PROGRAM, str(abort_after_s), *roles],
                    env={**os.environ, **environ, **of_this},
                    stdin=subprocess.PIPE if role in FAIL else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
            )
            processes.append(process)
        before = []
        for process, role in zip(processes, roles, strict=True):
            said = "begins" if role in (*FAIL, *ENDS) else "waits"
            before.append("".join(iter(lambda p=process, s=said: _line_unless(p, s), "")))
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
                process.stdin = None
        began = time.monotonic()
        codes = [process.wait(DEADLINE_S) for process in processes]
        took_s = time.monotonic() - began
        out = [earlier + process.stdout.read() for earlier, process in zip(before, processes, strict=True)]
    return Ended(codes, out, [(tmp_path / f"{i}.err").read_text() for i in range(len(roles))], took_s)


def _line_unless(process, said):
    """The next line of output; "" if it begins with `said`, or if the output has ended."""
    line = process.stdout.readline()
    return "" if line.startswith(said) else line


def test_an_exception_ends_the_other_processes_whatever_they_wait_for(tmp_path):
    ended = run_roles(tmp_path, "feed", "unreadable", "hears_late", "collective", "iterates", abort_after_s=8.0)
    told = "process 1 failed: RowError: the dataset failed on this row with ArithmeticError: as it was told to"
    row = "row 2, epoch 0, position 2"
    where = {"stage": "read", "process": 1, "row": 2, "epoch": 0, "position": 2}
    assert ended.codes == [1, 1, 1, 1, 1]
    assert f"caught {told} [stage read, process 1, {row}]" in ended.out[4]
    assert ended.took_s < 8 + PROMISED_S
    assert f"caught {where} {told} [stage read, process 1, {row}]" in ended.out[0]  # `next` raises it
    assert f"feedline.ProcessError: {told} [stage read, process 1, {row}]" in ended.err[2]
    assert "Traceback" in ended.err[1]
    for process in (0, 2, 3, 4):
        assert f"feedline: {told} [stage read, {row}]\n" in ended.err[process]
        named = map(blamed_process, ended.err[process].encode().splitlines())  # as the launcher reads it
        assert set(filter(None, named)) == {(1, False)}
    assert "feedline: process 1 failed" not in ended.err[1]  # its own traceback says so
    assert "no answer" not in "".join(ended.err)


@pytest.mark.nightly
def test_a_normal_end_of_one_process_does_not_end_the_others(tmp_path):
    ended = run_roles(tmp_path, "ends", "works_on", "ends")
    assert ended.codes == [0, 0, 0]
    assert ended.took_s > 1.5 * ABORT_AFTER_S  # nothing ended process 1 early
    assert [out.splitlines()[-1] for out in ended.out] == ["done"] * 3
    assert not any("failed" in err for err in ended.err)
    told = "reached the end of the program 0 s ago, and process 1 continues. If process 1 hangs, it waits for"
    assert told in ended.err[1]


def test_a_process_that_does_not_end_within_300_s_of_another_is_named_and_fails(tmp_path):
    """Here the limit is half a second."""
    ended = run_roles(tmp_path, "sleeps", "waits_no_longer", "sleeps")
    assert ended.codes == [1, 0, 1]
    assert ended.took_s < ABORT_AFTER_S + PROMISED_S
    told = (
        "feedline: process 0 failed: it had not reached its end 0.5 s after process 1 did, nor had process 2: "
        "look there for a step that hangs, or for work that one process does alone, such as a last evaluation; "
        "do such work before the last step\n"
    )
    for process, err in enumerate(ended.err):
        assert err.count(told) == 1
        assert (f"feedline: process {process} ends, too\n" in err) == (process != 0)


def test_a_process_that_leaves_a_feed_early_is_named_though_one_without_that_feed_ended_before(tmp_path):
    ended = run_roles(tmp_path, "ends", "leaves", "goes_on")
    assert ended.codes == [0, 1, 1]
    assert ended.took_s < ABORT_AFTER_S + PROMISED_S
    told = (
        "feedline: process 1 failed: it reached its end after 1 batches of a feed, but process 2 has taken [23],"
    )
    assert all(re.search(told, err) for err in ended.err)


def test_a_process_that_succeeded_exits_with_code_0_after_a_failure_of_another(tmp_path):
    ended = run_roles(tmp_path, "ends", "exits", abort_after_s=3.0)
    assert ended.codes == [0, 1]
    assert ended.took_s < 3 + PROMISED_S
    assert "feedline: process 1 failed: it found nothing to do\n" in ended.err[0]


def test_a_process_that_ends_without_building_a_feed_of_all_is_named(tmp_path, measured):
    ended = run_roles(tmp_path, "builds", "ends")
    assert ended.codes == [1, 1]
    assert ended.took_s < PROMISED_S
    told = (
        "every process of the mesh must build the feed, but process 1 reached the end of the program without "
        "building it"
    )
    assert f"feedline.ProcessError: {told}" in ended.err[0]
    assert f"feedline: process 1 failed: ProcessError: {told}" in ended.err[1]
    measured("it ends while others wait for it to build a feed", ended.took_s)


@pytest.mark.parametrize(("environ", "abort_after_s"), [(ENVIRON, None), (BY_JAX, 0)])
def test_without_a_monitor_only_waits_inside_feedline_raise_the_failure(tmp_path, environ, abort_after_s):
    ended = run_roles(tmp_path, "builds", "works", "exits", abort_after_s=abort_after_s, environ=environ)
    assert ended.codes == [1, 0, 3]
    assert (
        "feedline.ProcessError: process 2 failed: it found nothing to do [stage abort, process 2]" in ended.err[0]
    )
    assert ended.out[1].splitlines()[-1] == "done"
    assert "failed" not in ended.err[1]


def test_the_monitor_starts_after_jax_has_joined_and_another_hook_may_print_exceptions(tmp_path):
    ended = run_roles(tmp_path, "sleeps", "hooked", environ=BY_JAX)
    assert ended.codes == [1, 1]
    assert ended.out[1].endswith("pretty\n")
    assert "feedline: process 1 failed: ArithmeticError: as it was told to\n" in ended.err[0]
    assert ended.took_s < PROMISED_S


def test_a_reported_failure_names_the_process_that_failed_not_the_reporter(monkeypatch):
    """Several processes may raise the failure of one; the first of them to end reports it to the others."""
    with joined(1) as (service,):
        monkeypatch.setattr(monitor, "coordination", lambda: service)
        monitor.abort(ProcessError("unreadable", stage="read", process=1, row=7))
        told = "process 1 failed: ProcessError: unreadable [stage read, process 1, row 7]"
        monitor.abort(7)  # neither an error nor a string, and not the first failure
        assert str(monitor.poll_failure()) == told
