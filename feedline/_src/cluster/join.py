"""Joins this process with the others by `jax.distributed.initialize`, whatever started them."""

from __future__ import annotations

import functools
import math
import os
import time

from feedline._src.agreement.monitor import EXTRA_HEARTBEAT_S, say, watch
from feedline._src.cluster.binding import bind as bind_to_processors
from feedline._src.cluster.detect import describe_single_process, find
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.cluster.rendezvous import LOOPBACK, meet
from feedline._src.options import checked_seconds

_JAX_AT_LEAST_S = 30  # for jax to join the processes, after all have arrived
_JAX_HEARTBEAT_S = 100  # jax's default


def initialize(*, timeout_s: float = 300.0, abort_after_s: float | None = 10.0, bind: bool = True) -> None:
    """Detects what started this process, and calls `jax.distributed.initialize` with the right arguments.

    Call it first in every script, before any jax computation. It detects srun, mpirun, mpiexec, torchrun,
    pbsdsh, an Indexed Job of Kubernetes, `feedline launch` and variables set by hand (FEEDLINE_COORDINATOR,
    FEEDLINE_PROCESSES and FEEDLINE_PROCESS, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID),
    and prints in one line on stderr what it detected. If it detects none of them, this is the only process, and
    nothing is initialised. A second call is a no-op. If the processes were started in any other way (TPU pods,
    other MPIs), call `jax.distributed.initialize` first; this function then only starts the monitor.

    The GPUs of a host are divided among its processes; CPU devices are not. If only some of the host's memory
    nodes (NUMA) have GPUs of this process, the process is bound to the processors of these nodes, as far as the
    launcher or a control group allows. Threads and workers that it starts later inherit the binding.

    The monitor ends this process once another process has failed: by an uncaught exception, by
    `feedline.cluster.abort` (call it before `sys.exit`), or because it was killed. Code that waits inside
    feedline raises the failure at once; a thread inside a collective cannot be interrupted.

    Args:
      timeout_s: how long to wait for the others.
      abort_after_s: seconds from the failure of a process to the end of the others; until then, they may finish
        work that does not need the failed process. If a process is killed, only its missing heartbeats show this,
        so the others end 5 s later than after an exception. None: no monitor, and jax's heartbeat timeout (100 s).
      bind: False: do not bind the process to processors.

    Raises:
      ValueError: a time is wrong, or environment variables are missing; the error names the variables to set.
      FeedError: the coordinator cannot be reached, or its port belongs to another program or another run.
      ProcessError: a process did not arrive in time; the error names it.
      RuntimeError: from jax, if jax has already set up its devices: it is then too late to join.

    Example:
      >>> import feedline
      >>> feedline.cluster.initialize()  # doctest: +SKIP
      feedline: process 1 of 4, found Slurm (SLURM_PROCID=1), coordinator node1:61500, local device 1
    """
    import jax

    timeout_s = checked_seconds("timeout_s", timeout_s)
    if abort_after_s is not None:
        abort_after_s = checked_seconds("abort_after_s", abort_after_s)
    if not jax.distributed.is_initialized() and (info := _detect(bind)) is not None:
        deadline = time.monotonic() + timeout_s
        meet(info, deadline)
        heartbeat_s = _JAX_HEARTBEAT_S if abort_after_s is None else abort_after_s + EXTRA_HEARTBEAT_S
        jax.distributed.initialize(
            coordinator_address=info.coordinator,
            num_processes=info.processes,
            process_id=info.process,
            local_device_ids=info.local_devices,
            # Otherwise jax would detect the cluster itself, and use one GPU per process, even on a host that has
            # more GPUs than processes.
            cluster_detection_method="deactivate",
            initialization_timeout=max(_JAX_AT_LEAST_S, round(deadline - time.monotonic())),
            # None, the default: the coordinator listens on every address of the host.
            coordinator_bind_address=info.coordinator if info.host in LOOPBACK else None,
            # A killed process cannot report its failure; jax ends the others when its heartbeats stop.
            heartbeat_timeout_seconds=math.ceil(heartbeat_s),
        )
    if abort_after_s is not None:
        watch(abort_after_s)


@functools.cache
def _detect(bind: bool) -> ProcessInfo | None:
    """Detects what started this process, binds it to processors if `bind`, and prints both results, once."""
    info = find(os.environ)
    found = [str(info or describe_single_process(os.environ))]
    if bind and (binding := bind_to_processors(info)):
        found.append(binding)
    say(", ".join(found))
    return info
