"""What a source of rows offers, and what its rows look like: specs, values, row indices, bad rows."""
