"""Rows that can only be read one after the other: batches of lanes, their ends, their checkpoints."""
