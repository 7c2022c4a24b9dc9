"""The `feedline` command: one file a subcommand. Importing it imports no jax."""
