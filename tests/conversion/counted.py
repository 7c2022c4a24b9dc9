"""Sources for the tests of conversions, in a module that worker processes can import."""

import fcntl
import os
from pathlib import Path

import jax
import numpy as np

ROWS = 400
HEIGHT = 3


class Counted:
    """A source whose row i holds numbers computed from i. It remembers which rows were read.

    Args:
      before_read: is called with the row indices of each read.
    """

    def __init__(self, rows=ROWS, before_read=lambda rows: None):
        self.rows, self.before_read = rows, before_read
        self.spec = {"x": jax.ShapeDtypeStruct((HEIGHT,), np.int64), "y": jax.ShapeDtypeStruct((), np.float64)}
        self.identity = {"kind": "counted", "rows": rows}
        self.reads = []

    def __len__(self):
        return self.rows

    def read(self, rows, out):
        self.before_read(rows)
        self.reads.append(rows)
        out["x"][:] = (rows[:, None] << 40) + np.arange(HEIGHT)
        out["y"][:] = rows / 3

    def close(self):
        pass

    def __reduce__(self):
        return Counted, (self.rows, self.before_read)


def expected(rows=ROWS):
    source, out = Counted(rows), {"x": np.empty((rows, HEIGHT), np.int64), "y": np.empty(rows)}
    source.read(np.arange(rows), out)
    return out


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "conversion.json"}


def wait_in_the_middle(rows):
    """Say that row 250 was reached, and wait for the lock of a file."""
    if 250 in rows and "REACHED" in os.environ:
        with open(os.environ["REACHED"], "w") as pipe:
            pipe.write("x")
        with open(os.environ["GO_ON"]) as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def waiting():
    return Counted(before_read=wait_in_the_middle)
