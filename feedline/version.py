"""The version of this code. An installed package's metadata may be of other code than what is imported."""

__version__ = "0.1.0"
