"""The leaves of an element of an HDF5 dataset: where their bytes lie in it, and what they mean."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feedline._src.rows.spec import is_numeric
from feedline._src.sources.formats import extras

_UINT8 = np.dtype(np.uint8)
REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
"""How a dataset refers to a value of variable length in the file's heap, with addresses of 8 bytes."""


class RefusedError(ValueError):
    """A dataset is valid, but cannot be read as rows. The message says what to change."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """How the bytes of a value are stored.

    Attributes:
      stored: "heap" is variable length; the others have one length: "opaque", and strings padded with zeros, ended
        by a zero, or padded with spaces.
      dtype: of the values of variable length; uint8 for bytes and text.
    """

    stored: Literal["heap", "opaque", "zeros", "zero", "spaces"]
    dtype: np.dtype[Any] = _UINT8

    def value(self, stored: bytes) -> bytes:
        """The bytes that the user gets: text without its padding, numbers in the byte order of this machine."""
        if self.stored == "zeros":
            return stored.rstrip(b"\0")
        if self.stored == "zero":
            return stored.partition(b"\0")[0]
        if self.stored == "spaces":
            return stored.rstrip(b" \0")
        if self.dtype.isnative:
            return stored
        return np.frombuffer(stored, self.dtype).astype(self.dtype.newbyteorder("=")).tobytes()


@dataclasses.dataclass(frozen=True)
class Field:
    """A leaf of an element.

    Attributes:
      names: its place in a compound type; empty if the element is not compound.
      offset: where it begins in the element, in bytes.
      dtype, shape: of its value. For bytes, those of what is stored.
      bytes: how the bytes are stored; None for numbers.
    """

    names: tuple[str, ...]
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    bytes: Bytes | None = None

    def of(self, elements: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The leaf of uint8[..., bytes of an element], with a copy unless the element has no other leaf."""
        size = self.dtype.itemsize * int(np.prod(self.shape))
        own = np.ascontiguousarray(elements[..., self.offset : self.offset + size])
        return own.reshape(-1).view(self.dtype).reshape(*elements.shape[:-1], *self.shape)


def fields_of(kind: Any, names: tuple[str, ...] = (), offset: int = 0) -> list[Field]:
    """The leaves of an element of this `h5py.h5t.TypeID`.

    Raises:
      RefusedError: it holds something else than numbers, booleans, bytes and text.
    """
    h5t = extras.require("h5py.h5t", "hdf5")
    group = kind.get_class()
    if group == h5t.COMPOUND and kind.dtype.kind != "c":
        found = []
        for i in sorted(range(kind.get_nmembers()), key=kind.get_member_offset):
            name, member = kind.get_member_name(i).decode(), kind.get_member_type(i)
            found += fields_of(member, (*names, name), offset + kind.get_member_offset(i))
            offset += _growth(member)
        return found
    if group == h5t.ENUM and kind.dtype != np.bool_:
        return fields_of(kind.get_super(), names, offset)
    if group == h5t.ARRAY:
        (*others, inner) = fields_of(kind.get_super(), names, offset)
        if others or inner.names != names or inner.bytes is not None:
            raise RefusedError("arrays inside of elements must be of numbers; write a dataset for each field")
        return [dataclasses.replace(inner, shape=(*kind.get_array_dims(), *inner.shape))]
    if group in (h5t.STRING, h5t.VLEN, h5t.OPAQUE):
        return [_bytes(kind, names, offset)]
    return [Field(names, offset, _number(kind))]


def bytes_of(kind: Any) -> int:
    """The size of an element in the file."""
    return int(kind.get_size()) + _growth(kind)


def _growth(kind: Any) -> int:
    """How many bytes more an element takes in the file than in memory, where text is a pointer."""
    h5t = extras.require("h5py.h5t", "hdf5")
    group = kind.get_class()
    if group == h5t.COMPOUND:
        return sum(_growth(kind.get_member_type(i)) for i in range(kind.get_nmembers()))
    return REFERENCE.itemsize - int(kind.get_size()) if group == h5t.STRING and kind.is_variable_str() else 0


def _number(kind: Any) -> np.dtype[Any]:
    h5t = extras.require("h5py.h5t", "hdf5")
    group, size = kind.get_class(), kind.get_size()
    if group == h5t.BITFIELD and size in (1, 2, 4, 8):  # as PyTables stores booleans
        return np.dtype(f"{'>' if kind.get_order() == h5t.ORDER_BE else '<'}u{size}")
    if group in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.COMPOUND):
        dtype: np.dtype[Any] = np.dtype(kind.dtype)
        if dtype == np.bool_ or (is_numeric(dtype) and dtype.itemsize == size and h5t.py_create(dtype) == kind):
            return dtype
    name = type(kind).__name__.removeprefix("Type").removesuffix("ID").lower()
    raise RefusedError(
        f"its elements must be numbers or booleans that NumPy has, bytes or text, and are of HDF5's class {name} "
        f"with {size} bytes; encode them as numbers, or leave the dataset out with columns=[...]"
    )


def _bytes(kind: Any, names: tuple[str, ...], offset: int) -> Field:
    h5t = extras.require("h5py.h5t", "hdf5")
    group, size = kind.get_class(), kind.get_size()
    if group == h5t.VLEN:
        (*others, inner) = fields_of(kind.get_super())
        if others or inner.names or inner.bytes is not None or inner.shape:
            raise RefusedError("values of variable length must be of bytes or numbers; write them as bytes")
        return Field(names, offset, np.dtype(np.uint8), (size,), Bytes("heap", inner.dtype))
    if group == h5t.STRING and kind.is_variable_str():
        return Field(names, offset, np.dtype(np.uint8), (REFERENCE.itemsize,), Bytes("heap"))
    stored: Any = "opaque"
    if group == h5t.STRING:
        stored = {h5t.STR_NULLTERM: "zero", h5t.STR_NULLPAD: "zeros"}.get(kind.get_strpad(), "spaces")
    elif kind.get_tag().startswith(b"NUMPY:"):
        raise RefusedError("dates and times must be numbers; write array.view(numpy.int64)")
    return Field(names, offset, np.dtype(np.uint8), (size,), Bytes(stored))
