"""Memory and disks that are full: an error that says so, and what was saved before stays good."""

import json

import programs
import pytest

pytestmark = pytest.mark.slow

SPACE = """
import json, logging, os, resource, time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

import feedline
from feedline._src.trainer.checkpoints import Checkpoints
from feedline._src.trainer.task import State

logging.getLogger("absl").setLevel(logging.CRITICAL)
ONE = SingleDeviceSharding(jax.devices()[0])
MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
DISK = Path("disk")


def tell(fault, action):
    began, told = time.monotonic(), None
    try:
        result = action()
    except Exception as error:
        result, told = None, f"{type(error).__name__}: {error}"
    print(json.dumps({"fault": fault, "told": told, "seconds": time.monotonic() - began}), flush=True)
    return result


def state_of(feed):
    step = feed.get_state()["step"]
    return State({"w": jax.random.normal(jax.random.key(step), (100_000,))}, (), jnp.int32(step))


def save(folder, steps):
    # a checkpoint after each of the steps
    with feedline.Feed({"x": np.zeros((64, 4), np.float32)}, 4, ONE) as feed:
        with Checkpoints(DISK / folder, feed, MESH) as checkpoints:
            checkpoints.restore(lambda: state_of(feed))
            for _ in range(steps):
                next(feed)
                checkpoints.save(state_of(feed))


def newest(folder):
    with feedline.Feed({"x": np.zeros((64, 4), np.float32)}, 4, ONE) as feed:
        with Checkpoints(DISK / folder, feed, MESH) as checkpoints:
            restored = checkpoints.restore(lambda: state_of(feed))
            good = bool((restored.params["w"] == state_of(feed).params["w"]).all())
            return {"step": int(restored.step), "good": good}


def limited():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    rows = np.broadcast_to(np.uint8(1), (4096, 1 << 20))  # they take no memory
    with feedline.Feed({"x": rows}, 320, ONE, prefetch=0) as feed:
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
        try:
            next(feed)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            assert next(feed)["x"].shape == (320, 1 << 20)  # the feed goes on, once there is memory


tell("checkpoint", lambda: save("checkpoints", 3))
print(json.dumps({"fault": "restored", **newest("checkpoints")}))
tell("memory", limited)
"""


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if programs.run(["mount", "-t", "tmpfs", "-o", "size=1100k", "none", folder], check=False).returncode:
        pytest.skip("no permission to mount a file system")
    yield folder
    programs.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_and_a_limit_of_memory(start, measured, small_disk):
    ended = start(SPACE).end()
    assert ended.returncode == 0, ended.stderr
    assert not ended.left
    found = {each["fault"]: each for each in map(json.loads, ended.stdout.splitlines())}
    measured("the disk is full while a checkpoint is saved", found["checkpoint"]["seconds"])
    measured("no memory is left for a batch (`ulimit -v`)", found["memory"]["seconds"])
    restored = found["restored"]
    assert restored["good"]
    assert restored["step"] > 0
    full = "a checkpoint could not be written: No space left on device. Newest complete checkpoint: step"
    assert found["checkpoint"]["told"].startswith(f"FeedError: {full} {restored['step']}; make room")
    limit = "the memory of a batch must fit beside what this process uses, and 335,544,320 bytes for one of its "
    assert found["memory"]["told"].startswith(
        f"FeedError: {limit}leaves are not available (Cannot allocate memory); use a "
    )
