"""Stage 3: which thread places a batch and when, the bounded hand-over, and the watchdog. Does not import JAX."""
