"""`initialize` in a single process, and its errors."""

import os
import subprocess
import sys
import time

import pytest

from feedline.cluster import join
from feedline.cluster.launchers.process_info import ProcessInfo


def python(program, **environ):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def info(port, process):
    return ProcessInfo("a test", "PROCESS", f"127.0.0.1:{port}", 2, process)


def test_importing_the_package_imports_no_jax():
    done = python(
        "import sys, feedline.cluster, feedline.cluster.detect, feedline.cluster.launch, feedline.cli.launch\n"
        "assert callable(feedline.cluster.initialize)\n"
        "print({'jax', 'numpy'} & set(sys.modules))"
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


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
def test_a_process_that_jax_has_joined_does_not_join_again():
    done = python(
        "import feedline, jax, socket\n"
        "with socket.socket() as free:\n"
        "    free.bind(('127.0.0.1', 0))\n"
        "    port = free.getsockname()[1]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 1, 0, cluster_detection_method='deactivate')\n"
        "feedline.cluster.initialize()\n",
        FEEDLINE_COORDINATOR="nobody:1",
        FEEDLINE_PROCESSES="2",
        FEEDLINE_PROCESS="1",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_joining_after_a_computation_is_an_error():
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="goes before any jax computation"):
        join._join(info(port=1, process=1), deadline=time.monotonic(), abort_after_s=10)
