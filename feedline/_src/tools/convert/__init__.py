"""`feedline.convert`: writes rows of any source as file shards of one format, on one or many machines."""
