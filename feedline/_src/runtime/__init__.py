"""Thread-local JAX settings, forks and the interpreter's exit: what threads and processes must respect."""
