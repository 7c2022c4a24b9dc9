"""Rows of a source, read into memory of the test."""

import jax
import numpy as np


def read_rows(source, rows=None, strided=False):
    """Records, or leaves that held ones before; of all rows if none are given; `strided`: with gaps in between."""
    rows = np.arange(len(source)) if rows is None else np.asarray(rows, np.int64)
    if hasattr(source, "records"):
        return list(source.records(rows))
    out = jax.tree.map(
        lambda leaf: np.ones((len(rows), *leaf.shape, 1 + strided), leaf.dtype)[..., 0], source.spec
    )
    source.read(rows, out)
    return out
