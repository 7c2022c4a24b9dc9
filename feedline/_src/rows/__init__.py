"""The base classes of sources, and what all sources share: specs, checked casts, digests, bad rows."""
