"""Processes that srun started: the tasks of a Slurm step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from feedline._src.cluster.launchers.process_info import ProcessInfo, agreed_port, integer, own_devices
from feedline._src.cluster.launchers.variables import explicit_coordinator

_TASKS_AND_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")  # tasks per node, number of nodes


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process.

    A batch script and a shell under salloc are not tasks of a step. Slurm sets the variables of the job
    there, such as SLURM_NTASKS and a SLURM_PROCID of 0, but not those of a step. A job that was
    submitted from within a step inherits that step's variables; then the counts of tasks differ.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if not tasks:
        return environ.get("SLURM_PROCID", "0") != "0"
    return environ.get("SLURM_NTASKS", tasks) == tasks


def find_slurm(environ: Mapping[str, str]) -> ProcessInfo | None:
    """This process as a task of a Slurm step; None if the step has no other task.

    Example:
      >>> task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7",
      ...         "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_LOCALID": "0",
      ...         "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
      >>> print(find_slurm(task))
      process 1 of 2, found Slurm (SLURM_PROCID=1), coordinator node1:62343, all local devices
    """
    processes = integer(environ, "SLURM_STEP_NUM_TASKS", "Slurm", at_least=1)
    if processes == 1:
        return None
    process = integer(environ, "SLURM_PROCID", "Slurm")
    local_process = integer(environ, "SLURM_LOCALID", "Slurm")
    node = integer(environ, "SLURM_NODEID", "Slurm")
    processes_on_host = tasks_on(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    bound = environ.get("SLURM_GPUS_PER_TASK")  # If it is set, a task sees only its own GPUs.
    return ProcessInfo(
        "Slurm",
        f"SLURM_PROCID={process}",
        explicit_coordinator(environ) or _coordinator(environ, one_host=processes_on_host == processes),
        processes,
        process,
        None if bound else own_devices(environ, local_process, processes_on_host),
    )


def outside_step(environ: Mapping[str, str]) -> str | None:
    """A hint for a process in a job of several tasks that srun did not start, which is rarely meant; else None."""
    job, tasks = environ.get("SLURM_JOB_ID"), environ.get("SLURM_NTASKS", "1")
    if job is None or tasks == "1":
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
        if left < nodes:
            if not tasks:
                break  # impossible: this process is a task on this node
            return tasks
        left -= nodes
    raise ValueError(
        "SLURM_STEP_TASKS_PER_NODE has an entry for each node, such as 2(x3),1 for two tasks on each of three "
        f"nodes and one on a fourth, found {tasks_per_node!r} on node {node}; pass Slurm's variables on as is, "
        "or set FEEDLINE_COORDINATOR, FEEDLINE_PROCESSES and FEEDLINE_PROCESS"
    )


def _coordinator(environ: Mapping[str, str], one_host: bool) -> str:
    """The coordinator's address. Task 0 runs on the step's first node; job and step number give the port."""
    job = integer(environ, "SLURM_JOB_ID", "Slurm")
    step = integer(environ, "SLURM_STEP_ID", "Slurm")
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not nodes:
        raise ValueError(
            "Slurm names the coordinator's host in SLURM_STEP_NODELIST, but it is not set here; pass it "
            "on to this process (a container needs it named), or set FEEDLINE_COORDINATOR to host:port"
        )
    host = "127.0.0.1" if one_host else first_host(nodes)
    return f"{host}:{agreed_port(environ, f'{job}.{step}')}"
