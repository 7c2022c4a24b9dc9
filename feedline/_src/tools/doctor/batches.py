"""Checks of what a batch is made of: shardings, dtypes, and the number of leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feedline._src.tools.doctor.check import Check, size, unknown

_SMALL_BYTES, _MANY_SMALL = 64 << 10, 16
_REPLICATED_BYTES = 4096
_SAVED_BYTES, _SAVED_SHARE = 64 << 10, 0.25
_NARROW = ("uint8", "int8", "uint16", "int16")
_EXACT = {4: 1 << 24, 8: 1 << 53}
"""Above these magnitudes float32 and float64 no longer hold every integer, so integral values prove nothing."""


class Values(NamedTuple):
    """What sampled values of a leaf need: whether all are integers, and their bounds.

    Example:
      >>> Values.of(np.array([0.0, 255.0])).both(Values.of(np.array([7.0])))
      Values(integral=True, low=0.0, high=255.0)
    """

    integral: bool = True
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Values:
        """Those of an array of numbers."""
        if not array.size:
            return cls()
        if array.dtype.kind not in "iuf":  # bool, complex, bfloat16: not looked at
            return cls(False, 0, 0)
        integral = array.dtype.kind != "f" or bool(np.all(np.isfinite(array)) and np.all(array == np.rint(array)))
        return cls(integral, float(array.min()), float(array.max())) if integral else cls(False, 0, 0)

    def both(self, other: Values) -> Values:
        """Those of two arrays together."""
        return Values(self.integral and other.integral, min(self.low, other.low), max(self.high, other.high))


class Leaf(NamedTuple):
    """A leaf of a batch.

    Attributes:
      name: its path in the batch, for example ['image'].
      shape, dtype: of the global array.
      devices: on how many devices it lies; 1 for a NumPy array.
      replicated: whether each of these devices holds all of it.
      values: what its values need, in the batches that were sampled.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    devices: int = 1
    replicated: bool = False
    values: Values = Values(False, 0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def narrower(self) -> str | None:
        """The narrowest integer dtype that holds all samples exactly; float32 for other float64; or None."""
        have, values = jnp.dtype(self.dtype), self.values
        fits = values.integral and values.low <= values.high
        if fits and have.kind == "f":
            fits = max(-values.low, values.high) < _EXACT.get(have.itemsize, 0)
        for name in _NARROW if fits else ():
            bounds = np.iinfo(name)
            if np.dtype(name).itemsize < have.itemsize and bounds.min <= values.low and values.high <= bounds.max:
                return name
        return "float32" if have == np.float64 else None


def check_replicated(leaves: Sequence[Leaf]) -> Check:
    """Whether each device holds the whole batch where it could hold its part."""
    name = "sharding of the batch"
    if not any(leaf.devices > 1 for leaf in leaves):
        return unknown(name, "the batch lies on one device")
    whole = [leaf for leaf in leaves if leaf.replicated and leaf.devices > 1 and leaf.nbytes >= _REPLICATED_BYTES]
    surplus = sum(leaf.nbytes * (leaf.devices - 1) for leaf in whole)
    measured = {"replicated": [leaf.name for leaf in whole], "surplus_bytes": surplus}
    if not whole:
        devices = max(leaf.devices for leaf in leaves)
        return Check(name, "ok", f"sharded over {devices} devices", "", "", measured)
    return Check(
        name,
        "warning",
        f"{_named(whole)} replicated on {whole[0].devices} devices: {size(surplus)} more than sharded, each batch",
        'shard the rows: NamedSharding(mesh, PartitionSpec("data")), and pmap with in_axes=0',
        "each device receives and keeps all rows, and all devices compute the same",
        measured,
    )


def check_dtypes(leaves: Sequence[Leaf]) -> Check:
    """Whether the batch is shipped in wider dtypes than its values need."""
    name = "dtypes of the batch"
    wide = [(leaf, narrower) for leaf in leaves if (narrower := leaf.narrower)]
    saved = [(leaf, narrower, leaf.nbytes - _bytes_as(leaf, narrower)) for leaf, narrower in wide]
    saved = [each for each in saved if each[2] >= _SAVED_BYTES]
    total, of = sum(each[2] for each in saved), sum(leaf.nbytes for leaf in leaves)
    measured = {
        "leaves": {leaf.name: {"dtype": leaf.dtype, "fits": narrower} for leaf, narrower, _ in saved},
        "saved_bytes": total,
        "batch_bytes": of,
    }
    if not saved:
        return Check(name, "ok", f"{size(of)} a batch; no narrower dtype saves much", "", "", measured)
    told = ", ".join(f"{leaf.name} is {leaf.dtype} and fits {narrower}" for leaf, narrower, _ in saved[:3])
    more = f", and {len(saved) - 3} more leaves" if len(saved) > 3 else ""
    return Check(
        name,
        "warning" if total >= _SAVED_SHARE * of else "note",
        f"in the batches that were looked at {told}{more}: {size(total)} of {size(of)} a batch could be saved",
        f"ship {saved[0][1]} and convert in the compiled step: x.astype(jnp.{saved[0][0].dtype}), which XLA fuses",
        "host memory, the copy on the host and the transfer are as large as the dtype",
        measured,
    )


def check_small_leaves(leaves: Sequence[Leaf]) -> Check:
    """Whether the batch has many leaves that are small."""
    small = [leaf for leaf in leaves if leaf.nbytes < _SMALL_BYTES]
    measured = {"leaves": len(leaves), "small": len(small), "small_bytes": sum(leaf.nbytes for leaf in small)}
    if len(small) < _MANY_SMALL:
        return Check("number of leaves", "ok", f"{len(leaves)} leaves a batch", "", "", measured)
    return Check(
        "number of leaves",
        "warning",
        f"{len(small)} of {len(leaves)} leaves of the batch have less than {size(_SMALL_BYTES)}, "
        f"{size(measured['small_bytes'])} together",
        "concatenate leaves of one dtype into one array on the host, and split it in the compiled step",
        "each array costs a fixed time to place, whatever its size: 256 KiB in 64 arrays took 34 to 78 times as "
        "long as in one",
        measured,
    )


def batch_checks(leaves: Sequence[Leaf]) -> Iterable[Check]:
    """All checks of a batch."""
    return [check_replicated(leaves), check_dtypes(leaves), check_small_leaves(leaves)]


def _bytes_as(leaf: Leaf, dtype: str) -> int:
    return math.prod(leaf.shape) * np.dtype(dtype).itemsize


def _named(leaves: Sequence[Leaf]) -> str:
    told = ", ".join(f"{leaf.name} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3])
    return told + (f" and {len(leaves) - 3} more are" if len(leaves) > 3 else " are" if len(leaves) > 1 else " is")
