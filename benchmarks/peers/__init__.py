"""Other loaders, and feedline, over the same data: rows (peers.py) and JPEGs (images.py)."""
