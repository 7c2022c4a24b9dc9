"""Feeds in several real processes on this machine, joined by jax.distributed.

A map::

    cases      functions that run in every process of every topology
    values     what they give, put together from all processes
    launch     the topologies, and how one is started
    process    what each started process does
    layouts    shardings for a case to run on
    sources    rows for a case to read, and what NumPy says of them
    test_*     cases, each beside the test that judges it

Starting jax takes seconds, so each topology is started once and runs every case.
"""
