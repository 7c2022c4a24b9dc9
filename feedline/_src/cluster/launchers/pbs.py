"""pbsdsh of PBS Professional, OpenPBS or TORQUE, in a job script that says how many processes there are.

Only the first host of a job has the file that lists its hosts, and a job script has the same variables as pbsdsh's
first process. So the script names the coordinator and the number of processes, and pbsdsh numbers the processes.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import Job, ProcessInfo, family, integer, own_devices

DOCS = """\
| PBS | FEEDLINE_PROCESSES, under pbsdsh | PBS_VNODENUM (else PBS_NODENUM), FEEDLINE_PROCESSES | \
FEEDLINE_COORDINATOR |"""
_SCRIPT = """\
#!/bin/bash
#PBS -N feedline
#PBS -l select={hosts}:mpiprocs=1{gpus}
#PBS -l place=scatter:excl
coordinator=$(head -n 1 "$PBS_NODEFILE"):$((61440 + ${{PBS_JOBID%%[^0-9]*}} % 4096))
pbsdsh -- /usr/bin/env -C "$PBS_O_WORKDIR" PATH="$PATH" FEEDLINE_COORDINATOR="$coordinator" \\
  FEEDLINE_PROCESSES={hosts} {command}
"""


def started(environ: Mapping[str, str]) -> bool:
    by_hand = environ.get("FEEDLINE_PROCESS")
    return bool(environ.get("FEEDLINE_PROCESSES") and environ.get("PBS_NODENUM") and not by_hand)


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """TORQUE numbers the processes; PBS numbers the hosts, each of which has one process."""
    index = "PBS_VNODENUM" if environ.get("PBS_VNODENUM") else "PBS_NODENUM"
    found = family(environ, "PBS", "FEEDLINE_COORDINATOR", "FEEDLINE_PROCESSES", index)
    if found is None or index == "PBS_NODENUM" or not environ.get("PBS_NUM_PPN"):
        return found
    local = integer(environ, "PBS_NUM_PPN", "PBS", at_least=1)
    place = found.process % local, local
    devices = own_devices(environ, *place)
    return dataclasses.replace(found, local_process=place[0], local_processes=local, local_devices=devices)


def printed(job: Job) -> str:
    """The job script, for qsub."""
    if job.names or job.processes > 1:
        raise ValueError(
            "PBS chooses the hosts of a job, and numbers hosts, not processes; give the number of hosts and "
            f"one process for each: --hosts {job.hosts} --processes 1 --devices-per-process 8"
        )
    settings = [f"{name}={value}" for name, value in job.variables.items()]
    gpus = f":ngpus={job.gpus}" if job.gpus else ""
    return _SCRIPT.format(hosts=job.hosts, gpus=gpus, command=shlex.join([*settings, *job.command]))
