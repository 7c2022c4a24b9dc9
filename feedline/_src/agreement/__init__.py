"""Communication between the processes of a run, over jax's coordination service.

A map::

    coordination   keys and counters that all processes share; the only module that uses private names of jax
    agree          checks that all processes build the same feed
    in_step        checks that all processes take the same batches of a feed
    step_places    checks, at each step of training and each checkpoint, that all are at the same place in the data
    replicas       checks that all processes read the same bytes for the same rows
    all_gather     gathers a value from each process, and returns all values to each process
    monitor        ends the other processes when one fails, and names a process whose heartbeats stop
    stop           ends the loops of all processes at the same step, after a signal to one of them
"""
