"""Launchers, one module each: how a process learns its index and where all meet, and how processes are started.

A map::

    launcher         what a launcher declares, and what launchers share
    by_hand          FEEDLINE_* and JAX_* set by hand, or by `feedline launch`
    kubernetes       an Indexed Job or a JobSet
    pbs              pbsdsh
    torchrun         torchrun itself
    torch_variables  scripts that set torchrun's variables
    open_mpi         mpirun of Open MPI
    mpich            mpiexec of MPICH
    slurm            srun
    unknown          launchers that do not tell how to join
"""
