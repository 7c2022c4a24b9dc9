"""`feedline.convert`: writes rows of any source as file shards of one format, which many machines can write."""
