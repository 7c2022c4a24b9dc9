"""Checks a machine, and a training job, for known troubles of JAX on servers with several accelerators.

A map::

    command     `feedline doctor` and `feedline diagnose`
    check       the result of a check, the exit code, and how results are shown
    machine     checks of this machine: processors, memory, the disk, settings, versions
      devices     of its accelerators: bandwidth, the link, overlap
    feeds       checks of a user's feed: its options and its first batches
      batches     shardings, dtypes and leaves of a batch                                         pure
    job         runs a command while it is observed; inside/ is what observes in its processes
    job_checks  all checks of a job, from what was observed                                       pure
"""
