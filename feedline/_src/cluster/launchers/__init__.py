"""What other launchers tell the processes that they start, and the commands that start them.

A map::

    process_info  index, number of processes, coordinator and devices of this process
    variables     FEEDLINE_* and JAX_* set by hand, and the index of a Kubernetes job
    torchrun      torchrun, and scripts that set the same variables
    open_mpi      mpirun of Open MPI
    mpich         mpiexec of MPICH
    slurm         srun
    unknown       launchers that do not tell enough
    local         the place of a process among those of its host
    commands      prints the srun and mpirun command for several hosts
    jobset        prints the manifest of a Kubernetes JobSet
"""
