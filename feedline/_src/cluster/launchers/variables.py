"""Finds this process by FEEDLINE_* or JAX_* variables, set by `feedline launch`, a Kubernetes Job or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.process_info import ProcessInfo, integer

# Coordinator, count and index.
_FAMILIES = (
    ("FEEDLINE_COORDINATOR", "FEEDLINE_PROCESSES", "FEEDLINE_PROCESS"),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
# Kubernetes gives each pod of an Indexed Job its index, and nothing else.
_JOB_INDEX = "JOB_COMPLETION_INDEX"


def has_process_variables(environ: Mapping[str, str]) -> bool:
    """Whether a variable says how many processes there are, or which one this is."""
    return any(environ.get(name) for _, *names in _FAMILIES for name in names)


def explicit_coordinator(environ: Mapping[str, str]) -> str | None:
    """The coordinator that a variable names, if any; it replaces the one that a launcher would name."""
    return next((environ[name] for name, *_ in _FAMILIES if environ.get(name)), None)


def find_variables(environ: Mapping[str, str]) -> ProcessInfo | None:
    """The process that FEEDLINE_* or JAX_* describe; None if the count is 1, or nothing is set.

    In a Kubernetes Indexed Job the index may be left out: the Job sets it. A count of 1 needs
    neither index nor coordinator.

    Example:
      >>> print(find_variables({"FEEDLINE_COORDINATOR": "a:1234", "FEEDLINE_PROCESSES": "2",
      ...                       "JOB_COMPLETION_INDEX": "1"}))
      process 1 of 2, found Kubernetes (JOB_COMPLETION_INDEX=1), coordinator a:1234, all local devices
    """
    for names in _FAMILIES:
        if any(environ.get(name) for name in names):
            return _find_family(environ, *names)
    if environ.get(_JOB_INDEX):
        raise ValueError(
            f"A Kubernetes Indexed Job tells each pod only its index ({_JOB_INDEX}="
            f"{environ[_JOB_INDEX]}): the Job's manifest must set FEEDLINE_COORDINATOR (host:port of "
            "pod 0) and FEEDLINE_PROCESSES (its completions), which are not set; where each pod works "
            "on its own, set FEEDLINE_PROCESSES to 1"
        )
    return None


def _find_family(environ: Mapping[str, str], coordinator: str, processes: str, process: str) -> ProcessInfo | None:
    launcher, names = "environment variables", (coordinator, processes, process)
    if environ.get(processes) and integer(environ, processes, launcher, at_least=1) == 1:
        return None
    if not environ.get(process) and environ.get(_JOB_INDEX):
        launcher, process = "Kubernetes", _JOB_INDEX
    missing = " and ".join(name for name in (coordinator, processes, process) if not environ.get(name))
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        raise ValueError(
            f"{', '.join(names)} go together: found {present} without {missing}; set {missing} too, or "
            "unset all of them to run as one process"
        )
    index = integer(environ, process, launcher)
    count = integer(environ, processes, launcher)
    return ProcessInfo(launcher, f"{process}={index}", environ[coordinator], count, index)
