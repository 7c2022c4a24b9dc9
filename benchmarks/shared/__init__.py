"""What scripts of several folders use: limits, rounds, and the saved result."""
