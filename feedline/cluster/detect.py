"""What started this process: a pure function of the environment's variables."""

from __future__ import annotations

from collections.abc import Mapping

from feedline.cluster.found import Found
from feedline.cluster.open_mpi import find_open_mpi, under_mpirun
from feedline.cluster.slurm import find_slurm, in_step, outside_step
from feedline.cluster.variables import counted, find_variables


def find(environ: Mapping[str, str]) -> Found | None:
    """Which of how many processes this is; None if it is the only one.

    What somebody set by hand goes before what a launcher set. mpirun goes before srun, since under
    Slurm it starts its own processes with srun. An index or a count that is set without the rest
    is an error, a coordinator alone is not: it replaces the one that a launcher would name.

    Args:
      environ: the variables, as `os.environ` has them. Set to the empty string counts as not set.

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
    if counted(environ):
        return find_variables(environ)
    if under_mpirun(environ):
        return find_open_mpi(environ)
    if in_step(environ):
        return find_slurm(environ)
    return find_variables(environ)  # A Job's index or a coordinator, both errors alone, or nothing.


def why_alone(environ: Mapping[str, str]) -> str:
    """What to tell about a process for which `find` is None.

    Example:
      >>> why_alone({})
      'process 0 of 1, found no other'
    """
    return f"process 0 of 1, {outside_step(environ) or 'found no other'}"
