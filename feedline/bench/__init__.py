"""What `feedline bench` measures on a user's machine: one question a file."""
