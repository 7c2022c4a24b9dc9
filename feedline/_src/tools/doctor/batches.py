"""Checks of what a batch is made of: shardings, dtypes, and the number of leaves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor.check import Check, judged, unknown

_SMALL_BYTES, _MANY_SMALL = 64 << 10, 16
_REPLICATED_BYTES = 4096
_SAVED_BYTES, _SAVED_SHARE = 64 << 10, 0.25
_SAMPLED_BYTES = 64 << 20
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

    @classmethod
    def of(cls, name: str, array: Any, before: Leaf | None = None) -> Leaf:
        """The leaf of a batch; its values are sampled on one device, and joined with those of a batch before."""
        devices, replicated, part = 1, False, array
        if isinstance(array, jax.Array):
            devices, replicated = array.sharding.num_devices, array.sharding.is_fully_replicated
            part = array.addressable_data(0)
        values = Values.of(np.asarray(part)) if part.nbytes <= _SAMPLED_BYTES else Values(False, 0, 0)
        if before is not None:
            values = values.both(before.values)
        return cls(name, array.shape, str(array.dtype), devices, replicated, values)

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


def batch_checks(leaves: Sequence[Leaf]) -> list[Check]:
    """All checks of a batch."""
    return [check_replicated(leaves), check_dtypes(leaves), check_small_leaves(leaves)]


def check_replicated(leaves: Sequence[Leaf]) -> Check:
    """Whether each device holds the whole batch where it could hold its part."""
    name = "sharding of the batch"
    devices = max((leaf.devices for leaf in leaves), default=1)
    if devices == 1:
        return unknown(name, "the batch lies on one device")
    whole = [leaf for leaf in leaves if leaf.replicated and leaf.devices > 1 and leaf.nbytes >= _REPLICATED_BYTES]
    surplus = sum(leaf.nbytes * (leaf.devices - 1) for leaf in whole)
    finding = f"sharded over {devices} devices"
    if whole:
        listed = _listed([f"{leaf.name} {leaf.dtype}{list(leaf.shape)}" for leaf in whole])
        finding = (
            f"{listed} {'are' if len(whole) > 1 else 'is'} replicated on {whole[0].devices} devices: "
            f"{in_bytes(surplus)} more than sharded, each batch"
        )
    return judged(
        name,
        "warning" if whole else "ok",
        finding,
        'shard the rows: NamedSharding(mesh, PartitionSpec("data")), and pmap with in_axes=0',
        "each device receives and keeps all rows, and all devices compute the same",
        replicated=[leaf.name for leaf in whole],
        surplus_bytes=surplus,
    )


def check_dtypes(leaves: Sequence[Leaf]) -> Check:
    """Whether the batch is shipped in wider dtypes than its values need."""
    name, of = "dtypes of the batch", sum(leaf.nbytes for leaf in leaves)
    wide = [(leaf, narrower) for leaf in leaves if (narrower := leaf.narrower) and _saved(leaf, narrower)]
    total = sum(_saved(leaf, narrower) for leaf, narrower in wide)
    fits = {leaf.name: {"dtype": leaf.dtype, "fits": narrower} for leaf, narrower in wide}
    measured: dict[str, Any] = {"leaves": fits, "saved_bytes": total, "batch_bytes": of}
    if not wide:
        return judged(name, "ok", f"{in_bytes(of)} a batch; no narrower dtype saves much", **measured)
    listed = _listed([f"{leaf.name} is {leaf.dtype} and fits {narrower}" for leaf, narrower in wide])
    leaf, narrower = wide[0]
    return judged(
        name,
        "warning" if total >= _SAVED_SHARE * of else "note",
        f"in the batches that were looked at {listed}: {in_bytes(total)} of {in_bytes(of)} a batch could be saved",
        f"ship {narrower} and convert in the compiled step: x.astype(jnp.{leaf.dtype}), which XLA fuses",
        "host memory, the copy on the host and the transfer are as large as the dtype",
        **measured,
    )


def _saved(leaf: Leaf, dtype: str) -> int:
    """Bytes that the narrower dtype saves; 0 if they are few."""
    saved = leaf.nbytes - math.prod(leaf.shape) * np.dtype(dtype).itemsize
    return saved if saved >= _SAVED_BYTES else 0


def check_small_leaves(leaves: Sequence[Leaf]) -> Check:
    """Whether the batch has many leaves that are small."""
    small = [leaf.nbytes for leaf in leaves if leaf.nbytes < _SMALL_BYTES]
    many = len(small) >= _MANY_SMALL
    return judged(
        "number of leaves",
        "warning" if many else "ok",
        f"{len(small)} of {len(leaves)} leaves of the batch have less than {in_bytes(_SMALL_BYTES)}, "
        f"{in_bytes(sum(small))} together"
        if many
        else f"{len(leaves)} leaves a batch",
        "concatenate leaves of one dtype into one array on the host, and split it in the compiled step",
        "each array costs a fixed time to place, whatever its size: 256 KiB in 64 arrays took 34 to 78 times as "
        "long as in one",
        leaves=len(leaves),
        small=len(small),
        small_bytes=sum(small),
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
