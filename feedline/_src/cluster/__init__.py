"""Joins the processes of a run, whatever started them.

A map::

    join           initialize: this process joins the others
    detect         what started this process, from the environment variables
      launchers/     what srun, mpirun, torchrun and others tell their processes, and the commands that start them
    rendezvous     waits for all processes before jax starts; names missing processes
    cores          this process's share of the host's cores
    binding        binds the process to the processors near its GPUs

Once they have joined, processes communicate through `agreement`.
"""
