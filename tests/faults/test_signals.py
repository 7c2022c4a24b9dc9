"""Signals that come while workers start, while a feed closes, to a stopped job and to a launcher at work."""

import os
import re
import signal
import sys
import threading
import time

import pytest

pytestmark = pytest.mark.slow
PATIENCE_S = 300

BEFORE = """
import sys, threading, time
import jax, numpy as np
import feedline
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
"""


def lines_until(program, last):
    """The program's lines of output, up to the line `last`."""
    seen = []
    limit = threading.Timer(PATIENCE_S, program.kill)
    limit.start()
    for line in program.process.stdout:
        seen.append(line.rstrip("\n"))
        if seen[-1] == last:
            limit.cancel()
            return seen
    raise AssertionError(f"{seen}, {program.end().stderr}")


def signalled(program, number):
    """Signals all processes of a program, as a terminal does. Returns how it ended, and after how many seconds."""
    began = time.monotonic()
    os.killpg(program.process.pid, number)
    ended = program.end()
    return ended, time.monotonic() - began


STOPPED_S = 8
LIMITS = "stall_warning_s=5, stall_error_s=5"
IN_THE_LOOP = f"""
{BEFORE}
def slowly(batch, rows):
    time.sleep(0.3)
    return batch
if __name__ == "__main__":
    reading = feedline.Reading(threads=1, {LIMITS})
    with feedline.Feed(np.arange(800), 8, one, transform=slowly, reading=reading) as feed:
        next(feed)
        print("is stopped", flush=True)
        for _ in range(12):
            next(feed)
    print("went on", flush=True)
    np.save("x.npy", np.arange(800))
    with feedline.Feed("x.npy", 8, one, reading=feedline.Reading(workers=2)) as feed:
        for step, batch in enumerate(feed):
            if step == 5:
                print("is interrupted", flush=True)
"""


def test_a_program_goes_on_after_it_was_stopped_and_ctrl_c_ends_it_with_its_workers(start, measured):
    """Slurm stops all processes of a job to make room for another job, and continues them later."""
    program = start(IN_THE_LOOP)
    lines_until(program, "is stopped")
    time.sleep(0.5)  # so that the loop waits for a batch
    os.killpg(program.process.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.killpg(program.process.pid, signal.SIGCONT)
    began = time.monotonic()
    assert lines_until(program, "went on") == ["went on"]
    measured("the job is suspended for longer than `stall_error_s`, then continued", time.monotonic() - began)
    lines_until(program, "is interrupted")
    ended, seconds = signalled(program, signal.SIGINT)
    measured("Ctrl-C in your own loop, with workers", seconds)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert ended.left == []


WHILE_WORKERS_START = f"""
{BEFORE}
if __name__ == "__main__":
    np.save("x.npy", np.arange(800))
    with feedline.Feed("x.npy", 8, one, reading=feedline.Reading(workers=2)) as feed:
        print("starts", flush=True)
        next(feed)
"""


def test_ctrl_c_while_workers_start(start, measured):
    """Workers import jax for seconds, and must not each show a traceback meanwhile."""
    program = start(WHILE_WORKERS_START)
    lines_until(program, "starts")
    deadline = time.monotonic() + PATIENCE_S
    while len(program.processes()) < 4 and time.monotonic() < deadline:  # program, 2 workers, resource tracker
        time.sleep(0.01)
    time.sleep(0.5)
    ended, seconds = signalled(program, signal.SIGINT)
    measured("Ctrl-C while workers start", seconds)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert ended.left == []


WHILE_CLOSE_WAITS = f"""
{BEFORE}
class Stuck:
    spec, identity = {{"x": jax.ShapeDtypeStruct((), np.int32)}}, {{"kind": "stuck"}}
    def __len__(self):
        return 800
    def read(self, rows, out):
        if 80 in rows:
            threading.Event().wait()
        out["x"][:] = rows
    def close(self):
        pass
class Feed(feedline.Feed):
    def close(self):
        print("closes", flush=True)
        super().close()
with Feed(Stuck(), 8, one, order=feedline.Order(shuffle=False)) as feed:
    print("waits", flush=True)
    list(feed)
"""


def test_a_second_ctrl_c_ends_a_program_whose_close_waits_for_a_read(start, measured):
    program = start(WHILE_CLOSE_WAITS)
    lines_until(program, "waits")
    time.sleep(1)
    os.killpg(program.process.pid, signal.SIGINT)
    lines_until(program, "closes")
    ended, seconds = signalled(program, signal.SIGINT)
    measured("Ctrl-C twice, while a read hangs", seconds)
    assert ended.returncode == -signal.SIGINT
    assert seconds < 20  # less than the 30 s that `close` alone waits
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in ended.stderr
    assert ended.left == []


FEEDLINE = "import sys; from feedline._src.tools.main import main; sys.exit(main())"
TRAIN = [sys.executable, "-m", "feedline", "train", "--layers", "1"]
PROCESSES = ["launch", "--processes", "2", "--cpu", "--", *TRAIN]


def test_training_goes_on_from_the_last_checkpoint_after_its_launcher_was_killed(start, measured, tmp_path):
    checkpoints = ["--width", "16", "--checkpoint-dir", "runs", "--save-every", "20", "--steps"]
    program = start(FEEDLINE, *PROCESSES, *checkpoints, "1000000000")
    deadline = time.monotonic() + PATIENCE_S
    while len(saved(tmp_path / "runs")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    began = time.monotonic()
    program.process.kill()
    ended = program.end()
    measured("`kill -9` of the launcher", time.monotonic() - began)
    assert (ended.returncode, ended.left) == (-signal.SIGKILL, [])
    last = max(saved(tmp_path / "runs"))
    assert last % 20 == 0
    again = start(FEEDLINE, *PROCESSES, *checkpoints, str(last + 5)).end()
    assert again.returncode == 0, again.stderr
    told = re.findall(r"step ([\d,]+) is saved, training goes on from there", again.stderr)
    assert set(told) == {f"{last:,}"}
    assert again.left == []


def saved(folder):
    """The steps of whole checkpoints."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
