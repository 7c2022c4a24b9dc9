"""Rules for threads and processes: JAX's thread-local settings, forks, and the interpreter's exit."""
