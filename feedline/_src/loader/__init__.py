"""Stage 1: reads process-local batches of rows into host memory, with threads or worker processes."""
