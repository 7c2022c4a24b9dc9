"""Batches of streams, whose rows can only be read one after the other: lanes, their ends, their checkpoints."""
