"""`Reading(restart=n)`: workers that end, or that are stopped, are replaced, and the same batches come.

An exception that cannot be pickled arrives with its message."""

import multiprocessing
import os
import re
import resource
import sys
from multiprocessing import reduction

import numpy as np
import programs
import pytest
from background import PATIENCE_S, spawn
from limits import limited

from feedline._src.errors import FeedError
from feedline._src.loader.form import HostBatch
from feedline._src.loader.workers import Worker

SCRIPT = """
import logging, multiprocessing, os, signal, sys, threading, time
import jax, numpy as np
import feedline
from feedline._src.loader.workers import WorkerBatches
from feedline._src.prefetch.watch import Watch
from jax.sharding import SingleDeviceSharding

class Odd(Exception):
    def __init__(self, told, number):  # so that its pickle cannot be loaded
        super().__init__(told)

def raise_odd():
    raise Odd("no such luck", 7)

ENDS = {
    80: lambda: os.kill(os.getpid(), signal.SIGKILL),
    240: lambda: os.kill(os.getpid(), signal.SIGSTOP),
    400: lambda: os._exit(3),
}

def fails(batch, rows):
    if len(rows.index) > 1:
        for row, end in ENDS.items():
            if row in rows.index and not os.path.exists(f"ended at {row}"):
                open(f"ended at {row}", "w").close()
                end()
        if 440 in rows.index and not os.path.exists("told of 440"):
            raise_odd()
    return batch

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", stream=sys.stdout, force=True)
    np.save("x.npy", np.arange(480, dtype=np.float32))
    reading = feedline.Reading(workers=2, restart=2, stall_warning_s=1)

    def look():  # only the worker that is stopped shall exceed the limit, however long the others take to start
        while not os.path.exists("ended at 240"):
            time.sleep(0.1)
        object.__setattr__(reading, "stall_error_s", 3.0)

    patience_s = Watch.patience_s  # else a consumer that waits already would look at the limit after 300 s only
    Watch.patience_s = lambda watch: min(0.5, patience_s(watch))
    end_stuck_workers = WorkerBatches.end_stuck_workers

    def exceeded(batches, limit_s):
        object.__setattr__(reading, "stall_error_s", 300.0)
        return end_stuck_workers(batches, limit_s)

    WorkerBatches.end_stuck_workers = exceeded
    threading.Thread(target=look, daemon=True).start()
    feed = feedline.Feed(
        {"x": "x.npy"}, 8, SingleDeviceSharding(jax.devices()[0]), order=feedline.Order(shuffle=False),
        transform=fails, epochs=1, reading=reading,
    )
    rows, workers = [], set()
    while len(rows) < 480:
        try:
            for batch in feed:
                rows += np.asarray(batch["x"]).tolist()
                workers |= {child.pid for child in multiprocessing.active_children()}
        except feedline.WorkerError as error:
            print("ERROR", error, *error.__notes__)
            if "Odd" in str(error):
                open("told of 440", "w").close()
    print("ROWS", rows == list(range(480)), feed.get_state()["step"], feed.statistics().restarts)
    feed.close()
    assert feed.options.reading is reading
    print("LEFT", multiprocessing.active_children())
    print("WORKERS", *workers)
"""


@pytest.mark.slow
def test_workers_that_end_or_stop_are_replaced(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = programs.run(
        [sys.executable, "-W", "error", "script.py"], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    # `\d`: a stack in the log may show the source of this message, which has no number
    told = [line for line in done.stdout.splitlines() if re.search(r"is replaced \(restart \d", line)]
    assert len(told) == 2
    assert re.search(r"ended with exit code -9: .*\(restart 1 of 2\)", told[0])
    assert re.search(r"no batch came within Reading.stall_error_s = 3 s.*\(restart 2 of 2\)", told[1])
    assert re.search(r"ERROR a worker process .* exit code 3: .*Reading\(restart=2\) has replaced 2", done.stdout)
    assert "ERROR a worker process raised Odd, which cannot be pickled: no such luck [stage read]" in done.stdout
    assert ", in raise_odd" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith(("ROWS", "LEFT"))] == [
        "ROWS True 60 2",
        "LEFT []",
    ]
    (workers,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("WORKERS")]
    assert len(workers) >= 6


@pytest.fixture
def sent():
    """A worker and the other end of its connection. This end has sent a batch, but not the batch's memory."""
    worker = object.__new__(Worker)
    worker.connection, theirs = multiprocessing.Pipe()
    theirs.send(HostBatch([((1,), np.dtype(np.uint8))], None, None, 1, 0, [], []))
    return worker, theirs


def test_a_worker_that_stops_before_it_sends_the_memory_blocks_nobody(sent):
    worker, _ = sent
    wake, waker = multiprocessing.Pipe(duplex=False)
    waker.send_bytes(b"stop")
    assert spawn(lambda: worker.take(wake)).result(PATIENCE_S / 3) is None


@pytest.mark.parametrize("left", [0, 1])  # 1: enough for a copy of the pipe, not for the file
def test_a_batch_for_which_no_file_can_be_opened_is_told(sent, left):
    worker, theirs = sent
    wake, _ = multiprocessing.Pipe(duplex=False)
    memory = os.memfd_create("batch")
    reduction.send_handle(theirs, memory, os.getpid())
    os.close(memory)
    free = os.dup(0)
    os.close(free)
    message = r"no more can be opened \(Too many open files\); .* \(ulimit -n\)"
    with limited(resource.RLIMIT_NOFILE, free + left), pytest.raises(FeedError, match=message):
        worker.take(wake)
