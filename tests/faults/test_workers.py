"""Faults of worker processes: an error comes soon and says what happened, and no process is left."""

import json
import re

import pytest

pytestmark = pytest.mark.slow

START = """
import gc, json, multiprocessing, os, re, signal, sys, threading, time
import jax, numpy as np
import feedline
from jax.sharding import SingleDeviceSharding

def workers():
    return sorted(child.pid for child in multiprocessing.active_children())

def feed_of(rows, transform=None, **reading):
    return feedline.Feed(
        {"x": "x.npy"}, 8, SingleDeviceSharding(jax.devices()[0]), order=feedline.Order(shuffle=False),
        transform=transform, epochs=1, reading=feedline.Reading(**{"stall_warning_s": 300, **reading}),
    )
"""

STOPPED = (
    START
    + """
if __name__ == "__main__":
    np.save("x.npy", np.arange(4000, dtype=np.float32))
    with feed_of(4000, workers=2) as feed:
        for _ in range(5):
            next(feed)
        for pid in workers():
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
    print("CLOSED", time.monotonic() - began, "LEFT", workers())
    feed = feed_of(4000, workers=2)
    next(feed)
    for pid in workers():
        os.kill(pid, signal.SIGSTOP)
    print("EXIT", time.time(), flush=True)
"""
)


def test_stopped_workers_do_not_hold_up_close_or_exit(start, measured):
    """A worker that is stopped at any moment blocks nobody: it shares a pipe with this process, and no lock."""
    began_and_ended = start(STOPPED).end()
    assert (began_and_ended.returncode, began_and_ended.stderr, began_and_ended.left) == (0, "", [])
    closed = re.search(r"CLOSED (\S+) LEFT \[\]", began_and_ended.stdout)
    assert float(closed[1]) < 40  # 5 s on a quiet machine; 50 s when `close` ended one worker after the other
    measured("workers are stopped, and the feed is closed", float(closed[1]))


READS = """
if __name__ == "__main__":
    np.save("x.npy", np.arange(4000, dtype=np.float32))
    with feed_of(4000, workers=2) as feed:
        print(sum(1 for _ in feed), feed.statistics().restarts)
"""
HARMLESS = {
    "a default timeout": "import socket\nsocket.setdefaulttimeout(30)",
    "SIGTERM while it imports": "if __name__ == '__mp_main__': os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_ends_no_worker(what, start):
    ended = start(START + HARMLESS[what] + READS).end()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "500 0\n", "")


TOLD = (
    START
    + """
import resource, pathlib

class Odd(Exception):
    def __init__(self, told, number):  # so that its pickle cannot be loaded
        super().__init__(told)

def odd():
    raise Odd("no such luck", 7)

def takes_memory():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    bytes(16 << 30)

FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits with 0": lambda: os._exit(0),
    "raises what cannot be pickled": odd,
    "runs out of memory": takes_memory,
}

class Fails:
    def __init__(self, fault):
        self.fault = fault

    def __call__(self, batch, rows):
        if 160 in rows.index and len(rows.index) > 1:
            pathlib.Path("began").write_text(str(time.time()))
            FAULTS[self.fault]()
        return batch

if __name__ == "__main__":
    np.save("x.npy", np.arange(400, dtype=np.float32))
    for fault in FAULTS:
        with feed_of(400, Fails(fault), workers=1) as feed:
            taken = 0
            try:
                for batch in feed:
                    taken += 1
            except Exception as error:
                seconds = time.time() - float(pathlib.Path("began").read_text())
                print(json.dumps([fault, taken, seconds, f"{type(error).__name__}: {error}"]))
        assert workers() == []
"""
)

NAMES = {
    "killed": "a worker is killed, also by the kernel when memory runs out",
    "raises what cannot be pickled": "a worker raises an exception that cannot be pickled",
}
MEANT = {
    "killed": "WorkerError: .* ended with exit code -9: the kernel sends signal 9 .* when memory runs out",
    "exits with 0": "WorkerError: .* ended with exit code 0: its own code ended it",
    "raises what cannot be pickled": "WorkerError: a worker process raised Odd, which cannot be .*: no such luck",
    "runs out of memory": "MemoryError",
}


def test_a_worker_that_ends_is_told_within_seconds(start, measured):
    ended = start(TOLD).end()
    assert (ended.returncode, ended.stderr, ended.left) == (0, "", [])
    seen = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [fault for fault, *_ in seen] == [*MEANT]
    for fault, taken, seconds, told in seen:
        # on a busy machine, a worker that ends may have made batches that it has not sent yet
        assert taken in (range(12, 21) if fault in ("killed", "exits with 0") else (20,))
        assert re.match(MEANT[fault], told), told
        assert seconds < 30  # about 1 s on a quiet machine
        measured(NAMES.get(fault, f"a worker {fault}"), seconds)
