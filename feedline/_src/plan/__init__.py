"""What follows from the options of a feed, as one value: who reads what, shapes, memory, sizes that fit. Pure."""
