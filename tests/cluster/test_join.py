"""`initialize` in a single process, with the variables of torchrun, and its errors."""

import contextlib
import os
import socket
import subprocess
import sys

import programs
import pytest


def python(program, **environ):
    return programs.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_single_process_prints_one_line_and_does_not_join():
    done = python(
        "import feedline\n"
        "feedline.cluster.initialize()\n"
        "feedline.cluster.initialize(timeout_s=1)\n"
        "import jax\n"
        "print(jax.distributed.is_initialized(), jax.process_count())"
    )
    assert (done.stdout, done.stderr) == ("False 1\n", "feedline: process 0 of 1, found no other\n")


@pytest.mark.slow
def test_processes_with_the_variables_of_torchrun_compute_together(launcher, joined_members):
    """As torchrun sets them: it listens on MASTER_PORT itself, which is taken here, too."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
            "TORCHELASTIC_RUN_ID": "none",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        variables = {**os.environ, **launcher.variables, **common}
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(
                    programs.started(
                        launcher.member,
                        env={**variables, "RANK": index, "LOCAL_RANK": index},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
                for index in ("0", "1")
            ]
            written = [process.communicate(timeout=120) for process in started]
    out, err = map("".join, zip(*written, strict=True))
    done = subprocess.CompletedProcess(launcher.member, 0, out, err)
    assert launcher.members(done) == joined_members(2), err
    assert [line.partition(", coordinator")[0] for line in launcher.told(done)] == [
        f"feedline: process {index} of 2, found torchrun (RANK={index})" for index in range(2)
    ]
