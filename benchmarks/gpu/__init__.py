"""What feedline reaches on a GPU: gpu.py measures, plot.py draws."""
