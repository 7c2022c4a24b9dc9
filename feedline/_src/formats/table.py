"""Types that describe the rows of a file, independently of its store, its cache and its version.

A format describes a file as a list of trees of `FileArray`s (mapped), or as a `Grouped`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.rows.shards import Indices

if TYPE_CHECKING:
    from feedline._src.files.file import File

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Leaf = jax.ShapeDtypeStruct | str
"""Shape and dtype of a leaf in one row; "bytes" for a leaf of bytes or text of any length."""
_MAX_NAMES_SHOWN = 20
_BYTES_PER_GROUP = 100  # of memory for a source's index of groups, including temporary copies
_LEAVE_OUT = ", or leave columns of bytes and text out with open_source(..., columns=[...])"


# --- mapped ---


@dataclasses.dataclass(frozen=True, slots=True)
class FileArray:
    """An array that a file stores uncompressed. Rows are read by offset, or through a view of the mapped file.

    A mapped format describes a file as a list of trees, in the order of their rows. Leaves are `FileArray`s, or
    NumPy arrays if data had to be decoded, such as a compressed member of a `.npz`. If the dtype is structured,
    array["name"] is the array of one field. Offset and strides are in bytes, and never negative.
    """

    file: File
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls, file: File, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, fortran: bool = False
    ) -> FileArray:
        """Describe an array without gaps, in C or Fortran order. `dtype` may be a subarray dtype."""
        strides = _strides(shape[::-1], dtype.itemsize)[::-1] if fortran else _strides(shape, dtype.itemsize)
        more = _strides(dtype.shape, dtype.base.itemsize)
        return cls(file, dtype.base, (*shape, *dtype.shape), offset, (*strides, *more))

    def __post_init__(self) -> None:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        end = self.offset + last + self.dtype.itemsize
        if 0 not in self.shape and not 0 <= self.offset < end <= self.file.size:
            raise ValueError(f"it needs bytes {self.offset} to {end}, but the file has {self.file.size} bytes")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, name: str) -> FileArray:
        assert self.dtype.fields is not None
        field, at = self.dtype.fields[name][:2]
        more = _strides(field.shape, field.base.itemsize)
        shape, strides = (*self.shape, *field.shape), (*self.strides, *more)
        return FileArray(self.file, field.base, shape, self.offset + at, strides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def rows_have_gaps(self) -> bool:
        """Whether the elements of a row are not contiguous in C order."""
        return self.strides[1:] != _strides(self.shape[1:], self.dtype.itemsize)

    def view(self, memory: npt.NDArray[np.uint8]) -> Array:
        """The array as a view of `memory`, which has all bytes of the file."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def fields(array: Any) -> Any:
    """Return the fields of a structured array, in memory or in a file, as a dict; any other array unchanged.

    Example:
      >>> fields(np.zeros(2, [("x", np.uint8, (3,)), ("y", np.int32)]))["x"].shape
      (2, 3)
    """
    if array.dtype.names is None:
        return array
    return {name: fields(array[name]) for name in array.dtype.names}


# --- grouped ---


class Column(NamedTuple):
    """One leaf of some rows: numbers of one shape, or bytes of any length, one after the other in memory.

    Attributes:
      values: for numbers, [k, *row shape], contiguous; for bytes, uint8[n].
      ends: for numbers, None; for bytes, integers[k + 1]: value i is values[ends[i] : ends[i + 1]].
      null: bool[k], True for rows with a null; their values are meaningless. None: no row has a null.
    """

    values: Array
    ends: Array | None = None
    null: Mask | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.ends is None else max(0, len(self.ends) - 1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)

    @property
    def nulls(self) -> int:
        """The number of rows with a null."""
        return 0 if self.null is None else int(self.null.sum())

    def take(self, rows: Indices) -> Any:
        """Return copies of the values of these rows: an array of numbers, or a list of bytes."""
        if self.ends is None:
            return self.values[rows]
        starts, stops = self.ends[rows], self.ends[rows + 1]
        if len(rows) and not ((starts >= 0) & (starts <= stops) & (stops <= len(self.values))).all():
            raise ValueError("offsets of values must lie within the column, and do not; the file is damaged")
        view = self.values.data
        return [bytes(view[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def copied(self) -> Column:
        """Return a column with copies of `values` and `ends`."""
        return Column(self.values.copy(), None if self.ends is None else self.ends.copy(), self.null)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A file that stores rows in groups, such as row groups or record batches, each of which is decoded whole.

    Instead of groups, rows may be read by number: see `by_rows`. Leaves are numbered in the order in which JAX
    flattens `spec`. All functions are called from many threads. If a function raises an exception, the rows to be
    read are bad, unless the exception is a `FeedError` or the file was changed.

    Attributes:
      spec: tree of `Leaf`.
      lengths: for each leaf, the number of rows in each of its groups.
      read: (leaf, group) → a group's rows, cached unless `in_place`. Cached rows must keep no other memory alive.
      read_rows: (leaves, ascending rows) → the values of each leaf, a list or an array. Replaces `read`.
      row_extents: (rows) → offsets and lengths of the bytes that `read_rows` reads, to fetch them ahead.
      in_place: whether `read` returns views of a mapped file or of this object's memory. Views are not cached.
      held_bytes: how much memory this object holds; the sum over all files must fit into cache_bytes.
      extents: (leaf, group) → offset and length of each range of the group's bytes, to fetch them ahead.
      will_read: (leaf, groups, ahead) → whether it started fetching. Replaces `extents`; see `Files.will_read`.
      nulls: {leaf: its number of nulls}, if known without reading rows.
      arrays: () → the same rows, as trees of `FileArray`s and NumPy arrays. Used if all files of a source have it.
      are_dicts: whether rows are dicts even if their only column has bytes. If not, a row is the bytes themselves.
      instead: how to get arrays without decoding. A feed's error message for rows with bytes ends with this text.
      close: closes open files. A later read opens them again.
    """

    spec: Any
    lengths: Sequence[Sequence[int] | Indices]
    read: Callable[[int, int], Column]
    read_rows: Callable[[Sequence[int], Indices], Sequence[Sequence[Any]]] | None = None
    in_place: bool = False
    held_bytes: int = 0
    extents: Callable[[int, int], Sequence[tuple[int, int]]] = lambda leaf, group: ()
    will_read: Callable[[int, Sequence[int], int], bool] | None = None
    nulls: Mapping[int, int] = dataclasses.field(default_factory=dict)
    arrays: Callable[[], list[Any]] | None = None
    row_extents: Callable[[Indices], tuple[Indices, Indices]] | None = None
    are_dicts: bool = False
    instead: str = (
        f"{_LEAVE_OUT}, or number their values: column.combine_chunks().dictionary_encode().indices "
        "(docs/formats.md)"
    )
    close: Callable[[], None] = lambda: None


def by_rows(spec: Any, rows: int, read_rows: Callable[..., Sequence[Any]], **more: Any) -> Grouped:
    """Describe a file with `rows` rows, which are read by number. Other arguments: see `Grouped`."""

    def read(leaf: int, group: int) -> Column:
        raise NotImplementedError("rows are read by read_rows")

    more = {"instead": _LEAVE_OUT, **more}
    return Grouped(spec, [[rows]] * len(jax.tree.leaves(spec)), read, read_rows, **more)


def even_groups(rows: int, height: int, path: str) -> Indices:
    """Return int64[k]: the lengths of groups of `height` rows; the last has the rest. ValueError: k is too large.

    Example:
      >>> even_groups(7, 3, "x.h5").tolist()
      [3, 3, 1]
    """
    count = -(-rows // height)
    check_memory(path, "the index of its groups of rows", count * _BYTES_PER_GROUP)
    return np.diff(np.minimum(np.arange(count + 1, dtype=np.int64) * height, rows))


def check_same_rows(rows: Mapping[str, int], path: str) -> None:
    """Raise ValueError for a file that has no arrays, or arrays with different numbers of rows.

    Args:
      rows: the number of rows of each array, by its name.
    """
    names: dict[int, list[str]] = {}
    for name in sorted(rows):
        names.setdefault(rows[name], []).append(name)
    if not names:
        raise ValueError(f"a file of rows must have at least one array with rows, and {path} has none")
    if len(names) > 1:
        found = "; ".join(f"{count} rows: {few(names[count], ', ')}" for count in sorted(names))
        raise ValueError(
            f"all arrays of a file must have the same number of rows, and {path} has {found}; choose those that "
            "belong together with columns=[...]"
        )


def described(leaf: Leaf) -> str:
    """A leaf in words, such as "bytes" or "float32[3]"."""
    return leaf if isinstance(leaf, str) else f"{leaf.dtype}{list(leaf.shape)}"


def few(words: Sequence[str], separator: str) -> str:
    """Join the first `_MAX_NAMES_SHOWN` words, and append the number of words left out."""
    more = f"{separator}… {len(words) - _MAX_NAMES_SHOWN} more" if len(words) > _MAX_NAMES_SHOWN else ""
    return separator.join(words[:_MAX_NAMES_SHOWN]) + more


# --- for several formats ---


@contextlib.contextmanager
def naming_file(path: str, form: str, remedy: str) -> Iterator[None]:
    """A context manager that turns a library's errors, which have many types, into errors that name the file.

    Args:
      form: what the file should be.
      remedy: how to fix the file, for the message.

    Raises:
      ValueError: the file cannot be read as `form`.
      OSError: the disk cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, FeedError, ImportError):
        raise
    except Exception as error:
        # an errno means a failing disk, except EINVAL, which a seek below 0 raises if the content is damaged
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise OSError(error.errno, f"{path} cannot be read: {error.strerror}", path) from error
        raise ValueError(
            f"{path} cannot be read as {form}: {str(error) or type(error).__name__}. It may be truncated, or in "
            f"another format; {remedy}"
        ) from error


def memory_bytes() -> int:
    """Return the largest size of an array: the machine's memory, or what ulimit -v leaves to this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    machine = page * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine
    with open("/proc/self/statm") as sizes:
        used = page * int(sizes.read().split()[0])
    return min(machine, max(0, limit - used))


def check_memory(path: str, what: str, needed: int) -> None:
    """Raise ValueError if `what` does not fit into memory, since some libraries would then end the process."""
    if needed > (has := memory_bytes()):
        raise ValueError(
            f"{path}: {what} must fit into memory, and takes {needed} bytes, but there are {has}; unless the "
            "file is damaged, write it again in smaller pieces"
        )
