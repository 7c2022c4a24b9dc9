"""Stage 3: the placement thread, the bounded hand-over and the watchdog. Knows no JAX."""
