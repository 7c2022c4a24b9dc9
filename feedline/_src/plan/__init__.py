"""Computes from options what each process reads, shapes, memory and sizes that fit, as one value. Pure."""
