"""`feedline launch`: the command line, the environment of each process, and their supervisor."""
