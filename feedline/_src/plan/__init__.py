"""Computes a `Plan` from options: what each process reads, shapes, memory, and batch sizes that fit. Pure."""
