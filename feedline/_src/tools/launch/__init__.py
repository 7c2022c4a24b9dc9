"""`feedline launch`: runs one command as several processes on this machine.

A map::

    command        the command line
    environments   the environment variables of each process; a port and GPUs for them
    supervisor     an event loop over output, signals, deadlines and ends of the processes
    process_group  no process outlives the launcher
"""
