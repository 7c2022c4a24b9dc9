"""Bytes with a size and a version, wherever they lie: on local disk, or in a store behind a cache on disk."""
