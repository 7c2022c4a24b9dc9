"""Feeds in several real processes on this machine, joined by jax.distributed.

A map::

    cases      functions that run in every process of every topology
    values     combines what a case returned in each process
    launch     the topologies, and how one is started
    process    the main function of each process
    layouts    shardings for the cases
    sources    rows for the cases, and the batches that NumPy expects
    test_*     cases, each beside the test that checks its result

Starting jax takes seconds, so each topology is started once and runs every case.
"""
