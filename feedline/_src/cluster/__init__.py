"""Joins the processes of a run, whatever started them.

A map::

    join           `initialize` joins this process with the others
    detect         detects what started this process, from the environment variables
      launchers/     one module per launcher: its environment variables, and the command that starts processes
    rendezvous     waits for all processes before jax starts; names missing processes
    cores          this process's share of the host's cores
    binding        binds the process to the processors near its GPUs

Once they have joined, processes communicate through `agreement`.
"""
