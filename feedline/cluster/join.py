"""Joins this process with the others under jax.distributed, whatever started them."""

from __future__ import annotations

import functools
import os
import socket
import sys
import time

from feedline.cluster.coordination import backends_are_initialized
from feedline.cluster.detect import find, why_alone
from feedline.cluster.found import Found
from feedline.errors import FeedError

_RETRY_S = 0.2


def initialize(*, timeout_s: float = 300.0) -> None:
    """Finds what started this process and calls `jax.distributed.initialize` rightly for it.

    Call it first in every script, before any jax computation: it knows srun, mpirun, an Indexed Job
    of Kubernetes, `feedline launch` and variables set by hand (FEEDLINE_COORDINATOR,
    FEEDLINE_PROCESSES and FEEDLINE_PROCESS, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID). A process that none of them started is on its own, and nothing is initialised.
    Writes one line on stderr that says what it found, before it waits for anybody.

    A second call does nothing, nor does one after `jax.distributed.initialize`, with which processes
    that were started in any other way (TPU pods, other MPIs) join by themselves.

    GPUs are shared out among the processes of a host, so that each belongs to one; the CPU's devices
    stay visible, all of them, to their process.

    Args:
      timeout_s: how long to wait for the others.

    Raises:
      ValueError: the environment says only in part which process this is; names what to set.
      FeedError: the coordinator cannot be reached, or cannot listen on its port.
      RuntimeError: jax has already computed something, so that it is too late.

    Example:
      >>> import feedline
      >>> feedline.cluster.initialize()  # doctest: +SKIP
      feedline: process 1 of 4, found Slurm (SLURM_PROCID=1), coordinator node1:61500, local device 1
    """
    import jax

    if not jax.distributed.is_initialized():
        found = _look()
        if found is not None:
            _join(found, time.monotonic() + timeout_s)


@functools.cache
def _look() -> Found | None:
    """Finds what started this process and says so, once."""
    found = find(os.environ)
    # One write a line: the processes share a terminal.
    sys.stderr.write(f"feedline: {found or why_alone(os.environ)}\n")
    sys.stderr.flush()
    return found


def _join(found: Found, deadline: float) -> None:
    import jax

    if backends_are_initialized():
        raise RuntimeError(
            "feedline.cluster.initialize() goes before any jax computation, but jax has already set up "
            "its devices in this process; call it first, before jax.devices(), jnp or a jitted function"
        )
    # jaxlib itself ends the process by a signal, without an exception, in both cases.
    if found.process == 0:
        _check_port(found)
    else:
        _await_coordinator(found, deadline)
    jax.distributed.initialize(
        coordinator_address=found.coordinator,
        num_processes=found.processes,
        process_id=found.process,
        local_device_ids=found.local_devices,
        # All is known: jax would else look again, and give a process on a host of many GPUs just one.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(deadline - time.monotonic())),
        # By default it listens on every address of the host.
        coordinator_bind_address=found.coordinator if _is_loopback(found.host) else None,
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


def _check_port(found: Found) -> None:
    """Asks whether the coordinator can listen; shares the port as gRPC does, and lets go of it."""
    host = found.host if _is_loopback(found.host) else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            port.bind((host, found.port))
        except OSError as error:
            raise FeedError(
                f"Process 0 listens as the coordinator, but port {found.port} cannot be had here "
                f"({error.strerror}); end the program that holds it, or set FEEDLINE_COORDINATOR to "
                f"{found.host} and another port, in every process",
                stage="launch",
                process=0,
            ) from error


def _await_coordinator(found: Found, deadline: float) -> None:
    """Returns once the coordinator listens.

    Tries again and again: nothing here could wake us. A name that does not resolve yet is as good as
    nobody listening, since a pod gets its name only when it starts.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((found.host, found.port), timeout=max(left, _RETRY_S)).close()
        except OSError as error:
            if left < _RETRY_S:
                raise FeedError(
                    f"Process 0 listens as the coordinator at {found.coordinator}, but it was not reached "
                    f"in time ({error}); look whether process 0 runs, on that host, and whether a "
                    "firewall closes the port; FEEDLINE_COORDINATOR names another, in every process",
                    stage="launch",
                    process=found.process,
                ) from error
        else:
            return
        time.sleep(_RETRY_S)
