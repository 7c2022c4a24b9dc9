"""A `RowSource` whose rows contain their row index. Tests derive their own sources from it."""

import jax


class Numbered:
    """`n` rows. Each leaf of row i is filled with i; `leaves` gives its shape and dtype by name."""

    identity = {"kind": "numbered"}  # noqa: RUF012

    def __init__(self, n, **leaves):
        self.n = n
        self.spec = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}

    def __len__(self):
        return self.n

    def read(self, rows, out):
        for leaf in out.values():
            leaf[...] = rows.reshape(-1, *[1] * (leaf.ndim - 1))

    def close(self):
        raise AssertionError("it is the user's to close")
