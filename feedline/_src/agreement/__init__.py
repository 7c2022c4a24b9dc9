"""Communication between the processes of a run, over jax's coordination service.

A map::

    coordination   gives all processes the same keys and counters; the only module that uses private names of jax
    agree          checks that all processes build the same feed,
    in_step        that they take the same batches of it,
    step_places    that they are at the same place at each step of training and at each checkpoint,
    replicas       and that they read the same bytes for the same rows
    all_gather     gives the values of all processes to each of them
    monitor        ends the other processes when one fails, and names a process whose heartbeats stop
    stop           ends the loops of all processes at the same step, after a signal to one of them
"""
