"""What feedline reaches on a GPU."""
