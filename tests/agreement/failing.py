"""A program for the tests: one of several processes, of which one fails while the others wait for it.

The arguments of ``failing.py 0.5 raises collective feed`` are `abort_after_s` (seconds or None), then what each of
three processes does. With 0 seconds, no process calls `feedline.cluster.initialize`. If the environment variable
JOINED_BY_JAX is set, the processes first join by `jax.distributed.initialize`.
"""

import os
import sys
import time

import jax

import feedline
from feedline._src.agreement import monitor

ABORT_AFTER_S = None if sys.argv[1] == "None" else float(sys.argv[1])

if "JOINED_BY_JAX" in os.environ:
    jax.distributed.initialize(
        os.environ["FEEDLINE_COORDINATOR"],
        int(os.environ["FEEDLINE_PROCESSES"]),
        int(os.environ["FEEDLINE_PROCESS"]),
        cluster_detection_method="deactivate",
    )
if ABORT_AFTER_S != 0:
    feedline.cluster.initialize(abort_after_s=ABORT_AFTER_S)

import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import sync_global_devices  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402


class Rows:
    """Eight rows. Reading row 2 blocks for ever, or raises if `broken`."""

    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 2 and self.broken:
            raise ArithmeticError("as it was told to")
        if i == 2:
            print("waits", flush=True)
            time.sleep(1000)
        return {"x": np.float32(i)}


def raises():
    raise ArithmeticError("as it was told to")


def hooked():
    """Replaces `sys.excepthook`, as `rich.traceback.install()` does, then raises."""
    sys.excepthook = lambda *error: print("pretty", flush=True)
    raises()


def unreadable():
    """Fails on a bad row, which the error of the feed names."""
    feed(broken=True)


def exits():
    feedline.cluster.abort("it found nothing to do")
    sys.exit(3)


def collective():
    print("waits", flush=True)
    sync_global_devices("the others")


def feed(broken=False):
    here = SingleDeviceSharding(jax.local_devices()[0])
    order = feedline.Order(shuffle=False)
    reading = feedline.Reading(threads=1, buffer=1)
    batches = feedline.Feed(Rows(broken), 1, here, order=order, reading=reading, prefetch=1)
    try:
        list(batches)
    except feedline.ProcessError as error:
        print(f"caught {error.where} {error}", flush=True)
        raise


def iterates():
    """Waits for the next batch of its own iterator."""

    def batches():
        yield np.zeros((8, 2), np.float32)
        print("waits", flush=True)
        time.sleep(1000)

    try:
        list(feedline.prefetch_to_mesh(batches(), SingleDeviceSharding(jax.local_devices()[0])))
    except feedline.ProcessError as error:
        print(f"caught {error}", flush=True)
        raise


def builds():
    """Waits for the others to build the same feed."""
    print("waits", flush=True)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    feedline.Feed(np.zeros((24, 2)), 2 * jax.device_count(), sharding)


def hears_late():
    """Does the same as `builds`; the monitor prints the failure 2 s late."""
    say = monitor.say
    monitor.say = lambda *lines: (time.sleep(2), say(*lines))
    builds()


def sleeps():
    print("waits", flush=True)
    time.sleep(1000)


def works():
    """Works longer than the others, and longer than `abort_after_s`; then reads a feed of its own."""
    time.sleep(2 * ABORT_AFTER_S if ABORT_AFTER_S else 2)
    list(feedline.Feed(np.zeros((8, 2)), 4, SingleDeviceSharding(jax.local_devices()[0]), epochs=1))


def works_on():
    """Does the same as `works`, but warns at once when another process has ended."""
    monitor._WARN_S = 0.0
    time.sleep(3)
    works()


def leaves(batches=1):
    """Ends after one batch of a feed that process 0 does not build."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1:]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    feed = feedline.Feed(np.zeros((24, 2)), jax.device_count() - 1, sharding)
    for _ in range(batches):
        next(feed)


def goes_on():
    """Takes three batches of the feed of `leaves`, then sleeps."""
    leaves(batches=3)
    sleeps()


def waits_no_longer():
    """Ends at once, and waits only briefly for the others."""
    monitor._SUCCESS_S = 0.5


def ends():
    """Ends at once, without a failure."""


if __name__ == "__main__":
    mine = sys.argv[2 + jax.process_index()]
    sync_global_devices("begin")
    print(f"begins {time.time()}", flush=True)
    if mine in ("raises", "hooked", "unreadable", "exits"):
        sys.stdin.read()  # until the test has seen that the others wait
    globals()[mine]()
    print("done", flush=True)
