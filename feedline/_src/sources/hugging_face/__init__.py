"""Datasets of Hugging Face's library `datasets`, which is never imported here: their Arrow memory as rows."""
