"""Observes a training job from inside of its processes, without a change to its script.

A map::

    start     called when Python starts in a process of the command; begins when jax has been imported
    diagnose  the start of `feedline diagnose`
    record    what was observed in this process, and the file to which it is written
    watched   `jax.jit` and `jax.pmap` whose functions are observed when they are called
    program   finds a Python loop that was unrolled into a compiled function                        pure
    loop      samples of what the training thread is doing, who holds the GIL, and what grows
    stacks    what a stack shows: the user's line, and what it waits for

Nothing of jax is replaced but `jax.jit` and `jax.pmap`. A hook that fails never changes what the job computes.
"""
