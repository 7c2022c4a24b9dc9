"""The order and the gather of columns in C, for calls that do not hold the interpreter's lock.

`columns.c` has the code; it is compiled when the package is installed, and `library.py` loads it. Where there was
no compiler, or ``FEEDLINE_PURE_PYTHON=1`` is set, nothing is loaded, and NumPy computes the same batches.
"""
