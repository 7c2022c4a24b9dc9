"""Which rows each batch of a run holds: pure functions of the seed, the epoch and the position."""
