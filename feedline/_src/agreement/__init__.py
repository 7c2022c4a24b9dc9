"""Communication between the processes of a run, over jax's coordination service.

A map::

    coordination   keys and counters; the only module that uses private names of jax
    agree          checks that all processes build the same feed
    in_step        and take the same batches of it
    step_places    and are at the same place at each step of training and at each checkpoint
    replicas       and read the same bytes of the same rows
    all_gather     gives the values of all processes to all of them
    monitor        the failure of one process ends the others; heartbeats name one that is silent
    stop           a signal to one process ends the loop of all, at the same step
"""
