"""What Python and JAX require of threads and processes: thread-local settings, forks, the exit."""
