"""`initialize`: what it does where there is nobody to join, and what it says where that fails."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from feedline.cluster import join
from feedline.cluster.found import Found
from feedline.errors import FeedError


def python(program, **environ):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def found(port, process):
    return Found("a test", "PROCESS", f"127.0.0.1:{port}", 2, process)


def test_importing_the_package_imports_no_jax():
    done = python(
        "import sys, feedline.cluster, feedline.cluster.detect, feedline.cluster.launch, feedline.cli.launch\n"
        "assert callable(feedline.cluster.initialize)\n"
        "print({'jax', 'numpy'} & set(sys.modules))"
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_process_on_its_own_says_so_once_and_joins_nobody():
    done = python(
        "import feedline\n"
        "feedline.cluster.initialize()\n"
        "feedline.cluster.initialize(timeout_s=1)\n"
        "import jax\n"
        "print(jax.distributed.is_initialized(), jax.process_count())"
    )
    assert (done.stdout, done.stderr) == ("False 1\n", "feedline: process 0 of 1, found no other\n")


def test_it_leaves_alone_what_jax_has_joined():
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


def test_after_a_computation_it_is_too_late():
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="goes before any jax computation"):
        join._join(found(port=1, process=1), deadline=time.monotonic(), abort_after_s=10)


def test_a_port_that_is_taken_is_told_and_not_a_crash():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            FeedError, match=rf"port {port} cannot be had here \(Address already in use\).* another port"
        ):
            join._check_port(found(port, process=0))


def test_the_port_that_the_launcher_holds_is_free_for_the_coordinator():
    from feedline.cluster.launch import _reserved_port

    with _reserved_port() as port:
        join._check_port(found(port, process=0))
        with socket.socket() as other, pytest.raises(OSError, match=re.escape("Address already in use")):
            other.bind(("127.0.0.1", port))


def test_a_coordinator_that_nobody_runs_is_told_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(FeedError, match=rf"127.0.0.1:{port}, but it was not reached in time .*process 1"):
            join._await_coordinator(found(port, process=1), time.monotonic() + 0.3)


def test_a_name_that_does_not_resolve_yet_is_waited_for(monkeypatch):
    """A pod gets its name when it starts."""
    answers = iter([socket.gaierror("Name or service not known"), ConnectionRefusedError("refused")])
    real = socket.create_connection

    def connect(address, timeout):
        error = next(answers, None)
        if error is not None:
            raise error
        return real(address, timeout)

    monkeypatch.setattr(join, "_RETRY_S", 0.01)
    monkeypatch.setattr(socket, "create_connection", connect)
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        join._await_coordinator(found(coordinator.getsockname()[1], process=1), time.monotonic() + 30)
    assert next(answers, None) is None
