"""What `feedline bench scale` measures: what one process does and sends, for up to thousands of processes.

A map::

    growth     all figures for each number of processes, and what must not grow
    plan       one process alone: builds a feed for a mesh that need not exist, and reads its part
    messages   what all processes tell each other, by the code of `feedline._src.agreement`
      service  the coordination service that this runs over, in simulated time
    real       real processes on this machine
      job      what each of them runs
"""
