"""Runs of several processes for the tests of faults."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import programs

MEMBER = Path(__file__).with_name("member.py")
PATIENCE_S = 150
"""How long a process may take to start, and to end after the fault."""


class Member:
    """One process of a run, whose output goes to files.

    Attributes:
      ended_s: how long after the fault it ended.
    """

    def __init__(self, folder, process, processes, coordinator, *arguments, prefix=(), **variables):
        self._folder, self.process = folder, process
        self.ended_s = None
        self._until_killed = contextlib.ExitStack()
        variables |= {"FEEDLINE_COORDINATOR": coordinator, "FEEDLINE_PROCESSES": str(processes)}
        variables |= {"FEEDLINE_PROCESS": str(process), "JAX_PLATFORMS": "cpu"}
        variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        with self._file("out").open("w") as out, self._file("err").open("w") as err:
            started = programs.started(
                [*prefix, sys.executable, MEMBER, *map(str, arguments)], limit_s=10 * PATIENCE_S,
                env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
            self._popen = self._until_killed.enter_context(started)

    @property
    def pid(self):
        return self._popen.pid

    @property
    def code(self):
        return self._popen.poll()

    @property
    def out(self):
        return self._file("out").read_text()

    @property
    def err(self):
        return self._file("err").read_text()

    @property
    def step(self):
        """The last step that it printed; -1 before the first."""
        steps = re.findall(r"step (\d+)", self.out)
        return int(steps[-1]) if steps else -1

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._until_killed.close()

    def _file(self, name):
        return self._folder / f"{self.process}.{name}"


def begun(members):
    """Wait until all have taken a step."""
    await_(lambda: all(member.step >= 0 or member.code is not None for member in members), members)
    assert all(member.code is None for member in members), [member.err for member in members]


def ended(members, began):
    """Wait until all have ended, and note when each did."""

    def all_ended():
        for member in members:
            if member.code is not None and member.ended_s is None:
                member.ended_s = time.monotonic() - began
        return all(member.ended_s is not None for member in members)

    await_(all_ended, members)


def await_(condition, members=(), patience_s=PATIENCE_S):
    """Wait until a condition holds that other processes bring about."""
    deadline = time.monotonic() + patience_s
    while not condition():
        told = "".join(f"\n--- {member.process}: {member.code}\n{member.out}{member.err}" for member in members)
        assert time.monotonic() < deadline, told
        time.sleep(0.02)
