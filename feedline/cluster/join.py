"""Joins this process with the others under jax.distributed, whatever started them."""

from __future__ import annotations

import functools
import math
import os
import sys
import time

from feedline.agreement.coordination import backends_are_initialized
from feedline.agreement.monitor import watch
from feedline.cluster.detect import find, why_alone
from feedline.cluster.found import Found
from feedline.cluster.rendezvous import is_loopback, meet

_HEARTBEAT_S = 100  # jax's own
_HEARTBEAT_LATER_S = 5.0
"""So much later is a lost process missed than one that failed: one that is merely held up must not be."""


def initialize(*, timeout_s: float = 300.0, abort_after_s: float | None = 10.0) -> None:
    """Finds what started this process and calls `jax.distributed.initialize` rightly for it.

    Call it first in every script, before any jax computation: it knows srun, mpirun, an Indexed Job
    of Kubernetes, `feedline launch` and variables set by hand (FEEDLINE_COORDINATOR,
    FEEDLINE_PROCESSES and FEEDLINE_PROCESS, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID). A process that none of them started is on its own, and nothing is initialised.
    Writes one line on stderr that says what it found, before it waits for anybody.

    A second call does nothing. Processes that were started in any other way (TPU pods, other MPIs) join by
    themselves with `jax.distributed.initialize`; a call after that only starts the monitor.

    The monitor, a thread, ends this process once another one has failed: see `abort_after_s`. What waits in
    feedline then raises the failure at once; a thread inside a collective cannot be interrupted. A process
    has failed if an exception ends it, whichever that is, or if it is killed; see `feedline.cluster.abort`
    for `sys.exit`.

    GPUs are shared out among the processes of a host, so that each belongs to one; the CPU's devices
    stay visible, all of them, to their process.

    Args:
      timeout_s: how long to wait for the others.
      abort_after_s: seconds from the failure of one process to the end of the others, in which they may
        finish what they can without it. A process that is killed is missed 5 s later than that, when
        its heartbeats stay out. None: no monitor, and jax's heartbeats (100 s).

    Raises:
      ValueError: the environment says only in part which process this is; names what to set.
      FeedError: the coordinator cannot be reached, or its port belongs to another program or another run.
      ProcessError: a process did not come in time; names it.
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
            _join(found, time.monotonic() + timeout_s, abort_after_s)
    if abort_after_s is not None:
        watch(abort_after_s)


@functools.cache
def _look() -> Found | None:
    """Finds what started this process and says so, once."""
    found = find(os.environ)
    # One write a line: the processes share a terminal.
    sys.stderr.write(f"feedline: {found or why_alone(os.environ)}\n")
    sys.stderr.flush()
    return found


def _join(found: Found, deadline: float, abort_after_s: float | None) -> None:
    import jax

    if backends_are_initialized():
        raise RuntimeError(
            "feedline.cluster.initialize() goes before any jax computation, but jax has already set up "
            "its devices in this process; call it first, before jax.devices(), jnp or a jitted function"
        )
    meet(found, deadline)
    jax.distributed.initialize(
        coordinator_address=found.coordinator,
        num_processes=found.processes,
        process_id=found.process,
        local_device_ids=found.local_devices,
        # All is known: jax would else look again, and give a process on a host of many GPUs just one.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(deadline - time.monotonic())),
        # By default it listens on every address of the host.
        coordinator_bind_address=found.coordinator if is_loopback(found.host) else None,
        # jax ends every process once one sends none; a killed process can say nothing itself.
        heartbeat_timeout_seconds=(
            _HEARTBEAT_S if abort_after_s is None else math.ceil(abort_after_s + _HEARTBEAT_LATER_S)
        ),
    )
