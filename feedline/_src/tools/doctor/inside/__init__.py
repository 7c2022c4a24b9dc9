"""Observes a training job from inside of its processes, without a change to its script.

A map::

    start     called when Python starts in a process of the command; begins when jax has been imported
    diagnose  another start, of `feedline diagnose`
    record    what was observed in this process, and the file to which it is written
    lines     the line of the user's code that led to a call
    fetches   transfers and waits on the training thread
    compiled  the functions of jax that compile
    calls     what is observed in the calls of one function
    growth    memory that grows with the steps
    program   a loop of Python that was unrolled into a compiled function                               pure
    probe     how long a thread waits for the interpreter's lock, and which threads compute

Only public functions of jax are wrapped. A failure of a hook never changes what the job computes.
"""
