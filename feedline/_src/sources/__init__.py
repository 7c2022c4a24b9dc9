"""The sources of rows: arrays, files, Grain datasets, objects that return records, lanes, and mixtures."""
