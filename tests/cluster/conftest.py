"""What the tests on real launchers share: commands, and what their processes saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEMBER = [sys.executable, str(Path(__file__).with_name("member.py"))]
TRAIN = [sys.executable, "-m", "feedline.cli.main"]
TRAIN += ["train", "--steps", "5", "--batch-size", "64", "--json"]
SLURM_CONF = os.environ.get("SLURM_CONF", "/run/feedline-cluster/slurm.conf")


class Launcher:
    """Runs commands where the launchers of the machine see them, with two CPU devices a process."""

    member = MEMBER
    train = TRAIN

    def run(self, *command, **environ):
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "SLURM_CONF": SLURM_CONF,
        }
        done = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, **variables, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    @staticmethod
    def printed(done):
        """The JSON objects on standard output. Other programs, such as Gloo, write there too."""
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def members(self, done):
        """What the members saw, by process."""
        return sorted(self.printed(done), key=lambda seen: seen["process"])

    @staticmethod
    def told(done):
        """What `initialize` said, in the order of the processes."""
        return sorted(line for line in done.stderr.splitlines() if line.startswith("feedline: "))


@pytest.fixture
def launcher():
    return Launcher()


def together(processes, local_devices=2):
    """What members see if all of them have found each other."""
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


@pytest.fixture(name="together")
def _together():
    return together
