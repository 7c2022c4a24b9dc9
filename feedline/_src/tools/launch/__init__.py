"""`feedline launch`: runs one command as several processes on this machine.

A map::

    command        the command line
    launch         starts the processes, and ends with them
      environments   the environment variables of each process     pure
      supervisor     waits for output, signals and ends of the processes
      start_errors   why a command could not be started
      process_group  no process outlives the launcher
      output, lines  prefixes each line of output with its process
      signals        delivers signals through a socket
"""
