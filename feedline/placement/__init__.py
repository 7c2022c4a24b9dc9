"""Stage 2: a process-local host batch → global arrays on the mesh. No threads."""
