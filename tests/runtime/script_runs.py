"""Runs a script until it and all its child processes have ended."""

import sys
import time

import programs

BEFORE = """
import os, signal, sys, threading, time
import jax, numpy as np
import feedline
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
"""


def run(tmp_path, body, *, timeout_s=180, flags=("-W", "error"), before=()):
    """Run a script. Returns its result and the seconds from its last line to the end of all its processes.

    These are the script, its child processes and Python's resource tracker. The tracker warns of leaked shared
    memory; with `-W error` that warning is raised inside the tracker and not shown.
    """
    script = tmp_path / "script.py"
    script.write_text(f"{BEFORE}{body}")
    done = programs.run(
        [*before, sys.executable, *flags, script], capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path
    )
    ended = time.time()
    ends = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    return done, ended - float(ends[-1].split()[1]) if ends else None
