"""Commands for the tests on real launchers, and what the processes print."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import programs
import pytest

MEMBER = [sys.executable, str(Path(__file__).with_name("member.py"))]
TRAIN = [sys.executable, "-m", "feedline._src.tools.main"]
TRAIN += ["train", "--batch-size", "64", "--json"]
SLURM_CONF = os.environ.get("SLURM_CONF", "/run/feedline-cluster/slurm.conf")


def await_line(log, pattern, deadline_s=120):
    """Wait until a line of a file matches. Another program writes the file, so this polls."""
    end = time.monotonic() + deadline_s
    while not (found := re.search(pattern, log.read_text() if log.exists() else "")):
        assert time.monotonic() < end, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.2)
    return found


class Launcher:
    """Runs commands under real launchers on this machine, with two CPU devices for each process."""

    member = MEMBER
    train = (*TRAIN, "--steps", "5")
    small = (*TRAIN, "--layers", "1", "--width", "16")
    await_line = staticmethod(await_line)

    variables: ClassVar = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "SLURM_CONF": SLURM_CONF,
    }

    def run(self, *command, **environ):
        done = programs.run(
            [str(word) for word in command],
            env={**os.environ, **self.variables, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    @contextlib.contextmanager
    def endless(self, *command, log, folder, ready="step 1 of", **environ):
        """Endless training that saves only when it is stopped; the block begins once its log matches `ready`."""
        options = ["--checkpoint-dir", str(folder), "--steps", "1000000000", "--save-every", "1000000000"]
        with (
            log.open("ab") as out,
            programs.started(
                [*map(str, command), *options],
                env={**os.environ, **self.variables, **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
            ) as started,
        ):
            await_line(log, ready)
            yield started

    @staticmethod
    def printed(done):
        """The JSON objects on standard output. Other programs, such as Gloo, write there too."""
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def members(self, done):
        """What the programs member.py printed, by process."""
        return sorted(self.printed(done), key=lambda seen: seen["process"])

    @staticmethod
    def saved(folder):
        """The steps of the checkpoints in a folder."""
        return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]

    @staticmethod
    def told(done):
        """The lines that `initialize` printed, in the order of the processes."""
        return sorted(line for line in done.stderr.splitlines() if line.startswith("feedline: "))


@pytest.fixture
def launcher():
    return Launcher()


def joined_members(processes, local_devices=2):
    """What the programs member.py print if all of them have joined."""
    devices = processes * local_devices
    return [
        {
            "process": process,
            "processes": processes,
            "local_devices": local_devices,
            "total": [devices * (devices - 1) / 2],
        }
        for process in range(processes)
    ]


@pytest.fixture(name="joined_members")
def _joined_members():
    return joined_members
