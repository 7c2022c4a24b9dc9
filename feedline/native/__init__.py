"""The order and the gather of columns in C, for calls that do not hold the interpreter's lock.

`columns.c` has the code, `build.py` compiles it when the package is installed, `library.py` loads it. Where there is
no compiler, or ``FEEDLINE_PURE_PYTHON=1`` is set, nothing is loaded, and NumPy computes the same batches.
"""
