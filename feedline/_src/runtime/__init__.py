"""What threads and processes must respect: thread-local settings of JAX, forks, and the interpreter's exit."""
