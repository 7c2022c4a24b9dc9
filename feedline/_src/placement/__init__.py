"""Stage 2: makes global arrays on the mesh from process-local host batches. Starts no threads."""
