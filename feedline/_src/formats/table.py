"""What a format makes of a file: plain descriptions of its rows that know no places, caches and versions.

There is one for each way to read: a list of trees of `FileArray`s (mapped), and `Grouped`.
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
"""Shape and dtype of a leaf of one row; or for leaves of any length what they are: "bytes", "bytes of int32"."""
_MAX_NAMES_SHOWN = 20
_BYTES_PER_GROUP = 100  # of the indices of a source, with copies


# --- mapped ---


@dataclasses.dataclass(frozen=True, slots=True)
class FileArray:
    """An array that lies in a file as it is: a view of the file's memory, or rows to read at their offsets.

    A mapped format describes a file as a list of trees, whose rows follow each other. The leaves are `FileArray`s,
    or NumPy arrays of what had to be decoded, such as a compressed member of a `.npz`. A field of a structured
    dtype is an array of its own: array["name"]. Offset and strides are in bytes, and never negative.
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
        """An array without gaps, in C or in Fortran order. A dtype may have a shape of its own."""
        strides = _strides(shape[::-1], dtype.itemsize)[::-1] if fortran else _strides(shape, dtype.itemsize)
        more = _strides(dtype.shape, dtype.base.itemsize)
        return cls(file, dtype.base, (*shape, *dtype.shape), offset, (*strides, *more))

    def __post_init__(self) -> None:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        end = self.offset + last + self.dtype.itemsize
        if 0 not in self.shape and not 0 <= self.offset < end <= self.file.size:
            raise ValueError(f"it has the bytes from {self.offset} to {end}, and the file has {self.file.size}")

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
        """Whether the elements of a row do not lie in C order, one after the other."""
        return self.strides[1:] != _strides(self.shape[1:], self.dtype.itemsize)

    def view(self, memory: npt.NDArray[np.uint8]) -> Array:
        """The array in `memory`, all bytes of the file."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def fields(array: Any) -> Any:
    """An array of records, in memory or in a file, as a dict of its fields; any other array as it is.

    Example:
      >>> fields(np.zeros(2, [("x", np.uint8, (3,)), ("y", np.int32)]))["x"].shape
      (2, 3)
    """
    if array.dtype.names is None:
        return array
    return {name: fields(array[name]) for name in array.dtype.names}


# --- grouped ---


class Column(NamedTuple):
    """A leaf of some rows: numbers of one shape, or bytes of any length in one piece of memory.

    Attributes:
      values: [k, *row shape], contiguous; of bytes uint8[n].
      ends: None; of bytes [k + 1]: value i is values[ends[i] : ends[i + 1]].
      null: bool[k], True for rows with a null, whose values are meaningless; None if there are none.
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
        """How many rows have one."""
        return 0 if self.null is None else int(self.null.sum())

    def take(self, rows: Indices) -> Any:
        """Copies of these values: an array of numbers, or a list of bytes."""
        if self.ends is None:
            return self.values[rows]
        starts, stops = self.ends[rows], self.ends[rows + 1]
        if len(rows) and not ((starts >= 0) & (starts <= stops) & (stops <= len(self.values))).all():
            raise ValueError("positions of values must lie within the column, and do not; the file is damaged")
        view = self.values.data
        return [bytes(view[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def copied(self) -> Column:
        """The rows in memory of their own."""
        return Column(self.values.copy(), None if self.ends is None else self.ends.copy(), self.null)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A file that stores rows in groups, which are decoded whole: row groups, record batches, rows of chunks.

    Or a file whose rows are read by their numbers: see `by_rows`. Leaves are numbered in the order in which JAX
    flattens `spec`. All functions are called from many threads. What they raise is a bad row, unless it is a
    `FeedError` or the file was changed.

    Attributes:
      spec: tree of `Leaf`.
      lengths: for each leaf the rows of each of its groups.
      read: (leaf, group) → the rows of a group, in memory of their own, since they are cached.
      read_rows: (leaves, rows) → for each leaf its values, a list or an array, in place of `read`. Rows ascend.
      row_extents: (rows) → offsets and lengths of their bytes, to fetch them ahead, for `read_rows`.
      in_place: `read` gives views of memory that stays, mapped or not, so they are not cached.
      held_bytes: of that memory, what is not mapped; that of all files must fit into cache_bytes.
      extents: (leaf, group) → offset and length of each part of its bytes, to fetch them ahead.
      will_read: (leaf, groups, ahead) → whether fetching has begun, in place of `extents`; see `Folder.will_read`.
      nulls: how many nulls a leaf has, where this is known without reading rows.
      arrays: makes trees of `FileArray`s and arrays of the same rows, used if all files of a source have them.
      are_dicts: whether a row with a single column of bytes is a dict, too, and not its bytes.
      instead: another way to arrays than decoding, for the error of a feed that was given rows with bytes.
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
        ", or leave columns of bytes and text out with open_source(..., columns=[...]), or number their values: "
        "column.combine_chunks().dictionary_encode().indices (docs/formats.md)"
    )
    close: Callable[[], None] = lambda: None


def by_rows(spec: Any, rows: int, read_rows: Callable[..., Sequence[Any]], **more: Any) -> Grouped:
    """A file with `rows` rows, which are read by their numbers. Other arguments are those of `Grouped`."""

    def read(leaf: int, group: int) -> Column:
        raise NotImplementedError("rows are read by read_rows")

    return Grouped(spec, [[rows]] * len(jax.tree.leaves(spec)), read, read_rows, **more)


def even_groups(rows: int, height: int, path: str) -> Indices:
    """int64[k]: the lengths of groups of `height` rows, the last of which has the rest. ValueError: too many.

    Example:
      >>> even_groups(7, 3, "x.h5").tolist()
      [3, 3, 1]
    """
    count = -(-rows // height)
    check_memory(path, "the index of its groups of rows", count * _BYTES_PER_GROUP)
    return np.diff(np.minimum(np.arange(count + 1, dtype=np.int64) * height, rows))


def check_same_rows(rows: Mapping[str, int], path: str) -> None:
    """Refuse, with a ValueError, a file whose arrays have different numbers of rows, or that has none.

    Args:
      rows: by the name of each array its number of rows.
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
    """A leaf in words, such as "bytes" and "float32[3]"."""
    return leaf if isinstance(leaf, str) else f"{leaf.dtype}{list(leaf.shape)}"


def few(words: Sequence[str], separator: str) -> str:
    """The first words, and how many more there are."""
    more = f"{separator}… {len(words) - _MAX_NAMES_SHOWN} more" if len(words) > _MAX_NAMES_SHOWN else ""
    return separator.join(words[:_MAX_NAMES_SHOWN]) + more


# --- for several formats ---


@contextlib.contextmanager
def naming_file(path: str, form: str, remedy: str) -> Iterator[None]:
    """Turn errors of a library inside a `with` block, of many types, into errors that name the file.

    Args:
      form: what the file should be.
      remedy: a change that works.

    Raises:
      ValueError: it cannot be read as that.
      OSError: the disk cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, FeedError, ImportError):
        raise
    except Exception as error:
        # of the disk; EINVAL is the content's: a library went to a position before the start
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise OSError(error.errno, f"{path} cannot be read: {error.strerror}", path) from error
        raise ValueError(
            f"{path} cannot be read as {form}: {str(error) or type(error).__name__}. It may be truncated or "
            f"another format; {remedy}"
        ) from error


def memory_bytes() -> int:
    """The memory that an array can have: the machine's, or what is left of a limit (ulimit -v)."""
    page = os.sysconf("SC_PAGE_SIZE")
    machine = page * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine
    with open("/proc/self/statm") as sizes:
        used = page * int(sizes.read().split()[0])
    return min(machine, max(0, limit - used))


def check_memory(path: str, what: str, needed: int) -> None:
    """Refuse, with a ValueError, what takes more bytes than there are: some libraries end the process else."""
    if needed > (has := memory_bytes()):
        raise ValueError(
            f"{path}: {what} must fit into memory, and takes {needed} bytes of the {has} there are; write it "
            "again in smaller pieces if it is not damaged"
        )
