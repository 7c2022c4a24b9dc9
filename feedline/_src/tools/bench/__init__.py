"""`feedline bench` measures the speed of a feed, and the effects of the trainer's modes and practices."""
