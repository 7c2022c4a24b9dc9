"""Measures what the batches of a feed cost, judges what limits training, and reports both to the user."""
