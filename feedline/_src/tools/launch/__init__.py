"""`feedline launch`: runs one command as several processes on this machine.

A map::

    command        the command line
    environments   the environment variables of each process; a port and GPUs for them
    supervisor     the processes: their output, signals, deadlines and ends
    process_group  no process outlives the launcher
"""
