"""The directory of checkpoints belongs to one run at a time."""

import errno
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import programs
import pytest
from background import PATIENCE_S
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.trainer import folder
from feedline._src.trainer.checkpoints import Checkpoints

HOLDER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from feedline._src.trainer.folder import Lock\n"
    "lock = Lock(Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_directory_is_refused_while_another_run_uses_it(tmp_path):
    """Also when it was killed; and what it was writing is not removed."""
    half = tmp_path / f"12{folder.TEMPORARY}"
    half.mkdir()
    mesh = Mesh(jax.devices(), "d")
    with (
        feedline.Feed({"x": np.arange(8)}, 8, NamedSharding(mesh, PartitionSpec("d"))) as feed,
        programs.started(
            [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
    ):
        assert other.stdout.readline() == b"held\n"
        told = rf"belongs to one run at a time, .*: process {other.pid} on {socket.gethostname()}; wait for its"
        for _ in range(2):
            with pytest.raises(feedline.FeedError, match=told):
                Checkpoints(tmp_path, feed, mesh)
        assert half.exists()
        other.kill()
        other.wait()
        for _ in range(2):
            with Checkpoints(tmp_path, feed, mesh):
                pass
        deadline = time.monotonic() + PATIENCE_S  # Orbax removes it on a thread of its own
        while half.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not half.exists()


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def refused(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder.fcntl, "flock", refused)
    folder.Lock(tmp_path).close()
    assert f"{tmp_path} has no file locks (No locks available): give no other run this directory" in caplog.text
