"""Checks a machine, and a training job, for known troubles of JAX on servers with several accelerators.

A map::

    check       the result of a check, and the exit code                                          pure
    report      the results as text, and as JSON
    machine     all checks of this machine
      processors  threads, quotas, affinity, memory nodes
      host        memory, shared memory, open files, the disk
      settings    GPU memory, 64-bit types, which devices JAX uses                                pure
      faults      versions that are known to be faulty, and XLA's fault with constant operands
      devices     bandwidth, the link, overlap
        overlap     runs a feed whose load and computation take equally long
    feeds       a user's feed: its options and its first batches
      batches     shardings, dtypes and leaves of a batch                                         pure
    job         runs a command while it is observed; inside/ is what observes in its processes
    job_checks  all checks of a job, from what was observed                                       pure
      functions     pmap, donation, unrolled loops                                                pure
      compilations  what was compiled again, and what had changed                                 pure

The functions `check_...` take measured values and decide, so that a test can give them any values.
"""
