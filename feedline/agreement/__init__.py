"""What the processes of one run tell each other, from the first agreement to a common stop.

A map::

    coordination keys, counters and barriers           knows jax's private names
    agree        all build the same feed, or none
      differences  which process differs in what       pure
    gather       what each process reports of a place in a run, for all of them
    replicas     processes that read the same rows compare checksums
    monitor      the failure of one process ends the others
    stop         a signal to one process ends the loop of all, at the same step
"""
