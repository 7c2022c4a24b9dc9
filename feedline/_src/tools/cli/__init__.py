"""What the subcommands of `feedline` share. Importing it imports no jax."""
