"""`feedline.convert`: rows of any source as files of one format, in shards that many machines can write."""
