"""Detects what started this process, from the environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.mpich import find_mpich, under_hydra
from feedline._src.cluster.launchers.open_mpi import find_open_mpi, under_mpirun
from feedline._src.cluster.launchers.process_info import ProcessInfo
from feedline._src.cluster.launchers.slurm import find_slurm, in_step, outside_step
from feedline._src.cluster.launchers.torchrun import find_torchrun, has_torch_variables, under_torchrun
from feedline._src.cluster.launchers.unknown import refuse_unknown
from feedline._src.cluster.launchers.variables import find_variables, has_process_variables


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """The index of this process, the number of processes, and the coordinator; None if it is the only process.

    Variables that are set by hand take precedence over those of a launcher. Of nested launchers, the inner one
    started this process: torchrun takes precedence over mpirun, and mpirun over srun, because under Slurm mpirun
    starts its own processes with srun. The variables of torchrun count last where torchrun did not set them:
    scripts for srun set some of them for all tasks alike. An index or a count that is set without the rest
    is an error. A coordinator alone is not: it replaces the one that a launcher would name.

    Pure, except under MPICH (see `control_address`).

    Args:
      environ: the variables, as in `os.environ`. An empty string counts as not set.

    Raises:
      ValueError: the variables are set in part, or contradict each other; names the one to set.

    Example:
      >>> found = find(
      ...     {"FEEDLINE_COORDINATOR": "node1:61500", "FEEDLINE_PROCESSES": "2", "FEEDLINE_PROCESS": "1"}
      ... )
      >>> found.process, found.processes, found.coordinator
      (1, 2, 'node1:61500')
      >>> find({"HOME": "/root"}) is None
      True
    """
    if has_process_variables(environ):
        return find_variables(environ)
    if under_torchrun(environ):
        return find_torchrun(environ)
    if under_mpirun(environ):
        return find_open_mpi(environ)
    if under_hydra(environ):
        return find_mpich(environ)
    if in_step(environ):
        return find_slurm(environ)
    if has_torch_variables(environ):
        return find_torchrun(environ)
    if not environ.get("SLURM_JOB_ID"):  # A batch script that a task of srun submits inherits its variables.
        refuse_unknown(environ)
    return find_variables(environ)  # Raises if only a Job's index or a coordinator is set.


def describe_single_process(environ: Mapping[str, str]) -> str:
    """The line that `initialize` prints if `find` returns None.

    Example:
      >>> describe_single_process({})
      'process 0 of 1, found no other'
    """
    return f"process 0 of 1, {outside_step(environ) or 'found no other'}"
