"""Stage 3: who places a batch and when, the bounded hand-over and the watchdog. Knows no JAX."""
