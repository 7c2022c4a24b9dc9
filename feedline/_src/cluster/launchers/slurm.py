"""srun: the tasks of a Slurm step."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import (
    BY_HAND,
    Job,
    ProcessInfo,
    agreed_port,
    explicit_coordinator,
    integer,
    own_devices,
)

DOCS = """\
| Slurm | SLURM_STEP_NUM_TASKS | SLURM_PROCID, SLURM_STEP_NUM_TASKS | the first host of SLURM_STEP_NODELIST, \
127.0.0.1 if it has all tasks; a port from a hash |"""
_TASKS_AND_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")  # tasks per node, number of nodes


def started(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a step.

    A batch script and a shell under salloc are not: they have the job's variables, such as SLURM_NTASKS and a
    SLURM_PROCID of 0, but not those of a step. A job that was submitted from within a step inherits that step's
    variables; its SLURM_NTASKS then differs from SLURM_STEP_NUM_TASKS.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if not tasks:
        return (environ.get("SLURM_PROCID") or "0") != "0"
    return (environ.get("SLURM_NTASKS") or tasks) == tasks


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    processes = integer(environ, "SLURM_STEP_NUM_TASKS", "Slurm", at_least=1)
    if processes == 1:
        return None
    process, node = integer(environ, "SLURM_PROCID", "Slurm"), integer(environ, "SLURM_NODEID", "Slurm")
    on_host = tasks_on(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    place = integer(environ, "SLURM_LOCALID", "Slurm"), on_host
    divided = environ.get("SLURM_GPUS_PER_TASK")  # a task then sees only its own GPUs
    return ProcessInfo(
        "Slurm",
        f"SLURM_PROCID={process}",
        explicit_coordinator(environ) or _coordinator(environ, one_host=on_host == processes),
        processes,
        process,
        *place,
        None if divided else own_devices(environ, *place),
    )


def _coordinator(environ: Mapping[str, str], one_host: bool) -> str:
    """Task 0 runs on the step's first node; the numbers of job and step give the port."""
    job, step = integer(environ, "SLURM_JOB_ID", "Slurm"), integer(environ, "SLURM_STEP_ID", "Slurm")
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not nodes:
        raise ValueError(
            "Slurm names the coordinator's host in SLURM_STEP_NODELIST, which is not set here; pass it on to this "
            "process (a container gets only variables that you name), or set FEEDLINE_COORDINATOR to host:port"
        )
    return f"{'127.0.0.1' if one_host else first_host(nodes)}:{agreed_port(environ, f'{job}.{step}')}"


def hint(environ: Mapping[str, str]) -> str | None:
    """A hint for a process that srun did not start though its job has several tasks; this is rarely intended."""
    job, tasks = environ.get("SLURM_JOB_ID"), environ.get("SLURM_NTASKS")
    if not job or tasks in (None, "", "1"):
        return None
    return f"Slurm job {job} has {tasks} tasks, but srun did not start this one: put srun before python"


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list.

    Example:
      >>> first_host("rack[2,4-5]-node[007-015],login")
      'rack2-node007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None, "the pattern matches the empty string"
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())


def tasks_on(tasks_per_node: str, node: int) -> int:
    """The number of tasks on a node of the step, from Slurm's run-length list.

    Example:
      >>> [tasks_on("2(x2),1", node) for node in range(3)]
      [2, 2, 1]
    """
    left = node
    for entry in tasks_per_node.split(","):
        match = _TASKS_AND_NODES.fullmatch(entry)
        if match is None:
            break
        tasks, nodes = int(match[1]), int(match[2] or 1)
        if left < nodes and tasks:
            return tasks
        left -= nodes
    raise ValueError(
        "SLURM_STEP_TASKS_PER_NODE must have an entry for each node, such as 2(x3),1 for two tasks on each of "
        f"three nodes and one on a fourth, found {tasks_per_node!r} on node {node}; pass Slurm's variables on "
        f"unchanged, or set {BY_HAND}"
    )


def printed(job: Job) -> str:
    """The srun command, for a shell on the login node."""
    settings = [f"{name}={value}" for name, value in job.variables.items()]  # srun passes its environment on
    words = [*(["env", *settings] if settings else []), "srun", f"--nodes={job.hosts}"]
    words.append(f"--ntasks-per-node={job.processes}")
    if job.names:
        words.append(f"--nodelist={','.join(job.names)}")
    if job.gpus:
        words.append(f"--gpus-per-node={job.processes * job.gpus}")
    # Slurm's own binding may choose cores far from the GPU; without it, initialize binds the process.
    return shlex.join([*words, "--exclusive", "--cpu-bind=none", "--kill-on-bad-exit=1", "--label", *job.command])
