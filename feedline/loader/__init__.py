"""Stage 1: rows → process-local host batches. The only room that imports Grain."""
