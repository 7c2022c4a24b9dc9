"""Communication between the processes of a run, over jax's coordination service.

A map::

    coordination   keys and counters                           knows jax's private names
    agree          checks that all processes build the same feed
      differences  the process and the field that differ     pure
    all_gather     collects a value from each process, and gives all values to all of them
    latest_values  a value that each process replaces, and that the others read without waiting
    replicas       processes that read the same rows compare checksums
    monitor        the failure of one process ends the others; heartbeats name one that is silent
    stop           a signal to one process ends the loop of all, at the same step
"""
