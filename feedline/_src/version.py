"""The version of this code. Not read from installed metadata, which may belong to another copy of feedline."""

__version__ = "0.1.0"
