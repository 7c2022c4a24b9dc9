"""What rows are read from: arrays, files, Grain datasets, objects that return records, and lanes."""
