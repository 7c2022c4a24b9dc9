"""What `feedline bench` measures for a user: each file answers one question."""
