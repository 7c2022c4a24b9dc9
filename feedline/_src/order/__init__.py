"""Computes the rows of each batch, as pure functions of seed, epoch and position."""
