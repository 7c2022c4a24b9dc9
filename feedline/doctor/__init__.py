"""Checks a machine, and a training job, for known troubles of JAX on servers with several accelerators.

A map::

    check       the result of a check, and the exit code                                          pure
    report      the results as text, and as JSON
    machine     all checks of this machine
      processors  threads, quotas, affinity, memory nodes
      cgroups     the limits of control groups
      host        memory, shared memory, open files, the disk
      settings    GPU memory, 64-bit types, which devices JAX uses                                pure
      faults      versions that are known to be faulty, and XLA's fault with constant operands
      devices     bandwidth, the link, overlap

The functions `check_...` take measured values and decide, so that a test can give them any values.
"""
