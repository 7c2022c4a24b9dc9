"""Checks a machine, and a training job, for known troubles of JAX on servers with several accelerators.

A map::

    command   `feedline doctor` and `feedline diagnose`
    findings  what a check found, the exit code, and how findings are shown
    checks    checks of this machine, of a feed, and of a batch
    job       runs a command with `start` in its Python processes, and judges what was observed
    start     begins to observe, or to diagnose, once a process has imported jax
    observe   compiled functions and their calls, from inside of a process
    sampling  what the training thread waits for, line by line, and who holds the GIL
"""
