"""The order and the gather of columns in C, called without holding the GIL.

`columns.c` is compiled when the package is installed, and `library.py` loads it. Without a compiler, or with
``FEEDLINE_PURE_PYTHON=1``, nothing is loaded, and NumPy computes the same batches.
"""
