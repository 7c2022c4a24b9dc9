"""Stage 1: reads process-local batches of rows into host memory, by threads or by worker processes."""
