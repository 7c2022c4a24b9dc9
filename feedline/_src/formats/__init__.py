"""File formats, one module each: how files are opened, checked, and mapped or read."""
