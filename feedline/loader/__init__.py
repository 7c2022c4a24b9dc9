"""Stage 1: rows → process-local batches on the host, by threads or by worker processes."""
