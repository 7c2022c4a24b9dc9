"""Arrow columns as NumPy rows, for Arrow files, Arrow streams and Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import require
from feedline._src.formats.table import Column, Leaf

Array = npt.NDArray[Any]
_MOST_SHOWN = 20
_IN_A_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def rows_of(column: Any, label: str) -> Column:
    """A column as rows: views of its buffers, with their sizes checked. Booleans and nulls are unpacked from bits.

    Args:
      column: a `pyarrow.Array` of a type that `row_of` supports.
      label: names the column in errors.

    Raises:
      ValueError: a buffer is smaller than its rows.
    """
    kind, count, types = column.type, len(column), require("pyarrow", "arrow").types
    if isinstance(kind, require("pyarrow", "arrow").BaseExtensionType):
        inner = rows_of(column.storage, label)
        return inner._replace(values=inner.values.reshape(count, *row_of(kind, label).shape))
    validity, data = (*column.buffers(), None)[:2]
    null = None
    if validity is not None:
        null = ~_bits(_bytes(validity), column.offset, count, label)
    if types.is_fixed_size_list(kind):
        start, stop = (row * kind.list_size for row in (column.offset, column.offset + count))
        inner = rows_of(column.values, label)
        values = inner.values[start:stop].reshape(count, kind.list_size, *inner.values.shape[1:])
        within = None
        if inner.null is not None:
            within = np.asarray(inner.null[start:stop].reshape(count, kind.list_size).any(1))
        return Column(values, null=_any_null(null, within))
    row = row_of(kind, label)
    found = _bytes(data)
    if types.is_boolean(kind):
        return Column(_bits(found, column.offset, count, label), null=_any_null(null, None))
    size = row.dtype.itemsize * int(np.prod(row.shape, dtype=np.int64))
    found = found[column.offset * size : (column.offset + count) * size]
    _check_size(found, count * size, label)
    return Column(found.view(row.dtype).reshape(count, *row.shape), null=_any_null(null, None))


def _bytes(buffer: Any) -> Array:
    if buffer is None or buffer.size == 0:  # of no rows
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)


def _bits(packed: Array, offset: int, count: int, label: str) -> npt.NDArray[np.bool_]:
    """The `count` booleans from bit `offset` on."""
    unpacked = np.unpackbits(packed[offset // 8 : -(-(offset + count) // 8)], bitorder="little")
    bits = unpacked[offset % 8 :][:count].view(np.bool_)
    _check_size(bits, count, label)
    return bits


def _check_size(found: Array, promised: int, label: str) -> None:
    if found.nbytes != promised:
        raise ValueError(
            f"{label}: a buffer must hold the rows that the metadata promises, {promised} bytes, and it has "
            f"{found.nbytes}; the file is damaged, write it again"
        )


def _any_null(
    first: npt.NDArray[np.bool_] | None, second: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.bool_] | None:
    """The rows with a null in at least one of two masks; None if there are none."""
    null = second if first is None else first if second is None else first | second
    return null if null is not None and null.any() else None


def row_of(kind: Any, label: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one row of a column whose type is the `pyarrow.DataType` `kind`.

    Raises:
      TypeError: its rows are not numbers, or differ in length.
    """
    pyarrow = require("pyarrow", "arrow")
    types = pyarrow.types
    if isinstance(kind, pyarrow.FixedShapeTensorType) and kind.permutation in (
        None,
        sorted(kind.permutation or []),
    ):
        return jax.ShapeDtypeStruct(tuple(kind.shape), row_of(kind.value_type, label).dtype)
    if types.is_fixed_size_binary(kind):
        return jax.ShapeDtypeStruct((kind.byte_width,), np.dtype(np.uint8))
    if types.is_fixed_size_list(kind):
        inner = row_of(kind.value_type, label)
        return jax.ShapeDtypeStruct((kind.list_size, *inner.shape), inner.dtype)
    if types.is_boolean(kind):
        return jax.ShapeDtypeStruct((), np.dtype(np.bool_))
    if types.is_integer(kind) or types.is_floating(kind):
        letter = "f" if types.is_floating(kind) else "i" if types.is_signed_integer(kind) else "u"
        return jax.ShapeDtypeStruct((), np.dtype(f"{letter}{kind.bit_width // 8}"))
    raise TypeError(f"{label} must have rows of one size that are numbers, got {kind}; {_remedy(kind)}")


def _remedy(kind: Any) -> str:
    """How to convert a column of an unsupported type to numbers, of `pyarrow` and `pyarrow.compute as pc`."""
    types = require("pyarrow", "arrow").types
    while types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_dictionary(kind):
        return "take its codes: column.combine_chunks().indices"
    if types.is_string_view(kind):
        return "cast it: column.cast(pyarrow.string())"
    if types.is_binary_view(kind):
        return "cast it: column.cast(pyarrow.binary())"
    if types.is_string(kind) or types.is_large_string(kind):
        return "tokenise it, or number its values: column.combine_chunks().dictionary_encode().indices"
    if types.is_date32(kind) or types.is_time32(kind):
        return "cast it: column.cast(pyarrow.int32())"
    if types.is_duration(kind):
        return f"count seconds: pc.divide(column.cast(pyarrow.int64()), {_IN_A_SECOND[kind.unit]})"
    if types.is_temporal(kind):
        return "count from a start, in a unit that fits int32: pc.seconds_between(pc.min(column), column)"
    if types.is_decimal(kind):
        return "cast it: column.cast(pyarrow.float64())"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "cast bytes of one length: column.cast(pyarrow.binary(length)), or decode others"
    if types.is_list(kind) or types.is_large_list(kind):
        return "cast lists of one length: column.cast(pyarrow.list_(type, length)), or pad others first"
    if types.is_struct(kind):
        return "flatten it: table.flatten()"
    return "cast it to numbers"


def names_of(schema: Any, path: object) -> list[str]:
    """The names of the columns of a file.

    Raises:
      ValueError: there are none, one occurs twice, or one is not UTF-8.
    """
    try:
        names: list[str] = schema.names
    except UnicodeDecodeError as error:
        raise ValueError(f"names of columns must be UTF-8, those of {path} are not; write it again") from error
    if not names:
        raise ValueError(f"a file of rows must have columns, and {path} has none; write it again")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"columns must have different names, {path} has {sorted(twice)[0]!r} twice; rename one")
    return names


def spec_of(schema: Any, options: OpenOptions, path: object) -> dict[str, Leaf]:
    """What a row of each of the chosen columns is, in the order of the columns.

    Raises:
      ValueError: a column is missing, or occurs twice.
      TypeError: columns have rows that are neither bytes nor numbers of one size. It lists all of them.
    """
    spec: dict[str, Leaf] = {}
    names = options.chosen(names_of(schema, path), str(path))
    refused = []
    for name in names:
        kind = schema.field(name).type
        try:
            spec[name] = "bytes" if is_bytes(kind) else row_of(kind, name)
        except TypeError:
            refused.append(f"{name!r} is {kind}: {_remedy(kind)}")
            continue
        if min(getattr(spec[name], "shape", ()), default=0) < 0:
            raise ValueError(f"column {name!r} of {path} has rows of type {kind}; the file is damaged")
    if refused:
        them = "it" if len(refused) == 1 else "them"
        leave = f", or leave {them} out: columns=[{_few([repr(name) for name in spec], ', ')}]" if spec else ""
        raise TypeError(
            f"all columns must have rows of one size that are numbers, and {len(refused)} of the {len(names)} of "
            f"{path} {'has' if len(refused) == 1 else 'have'} others. {_few(refused, '; ')}. Convert {them}, and "
            f"write the file again, as docs/tables.md shows{leave}"
        )
    return spec


def _few(words: Sequence[str], separator: str) -> str:
    """The first words, and how many more there are."""
    more = f"{separator}… {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else ""
    return separator.join(words[:_MOST_SHOWN]) + more


def is_bytes(kind: Any) -> bool:
    """Whether values of a `pyarrow.DataType` are bytes or text of any length, and lie one after the other.

    Views (`binary_view`) are refused: pyarrow follows damaged ones out of the file, and so ends the process.
    """
    types = require("pyarrow", "arrow").types
    return any(
        check(kind)
        for check in (
            types.is_binary, types.is_large_binary, types.is_string, types.is_large_string,
        )
    )  # fmt: skip


def column_of(array: Any, label: str) -> Column:
    """A `pyarrow.Array` of bytes, text or numbers. Arguments and errors as of `rows_of`.

    Raises:
      ValueError: a buffer is smaller than its rows.
    """
    pyarrow = require("pyarrow", "arrow")
    kind = array.type
    if not is_bytes(kind):
        return rows_of(array, label)
    validity, ends, data = array.buffers()
    wide = pyarrow.types.is_large_binary(array.type) or pyarrow.types.is_large_string(array.type)
    memory = _bytes(ends).view(np.int64 if wide else np.int32)
    memory = memory[array.offset : array.offset + len(array) + 1]
    if len(array) and len(memory) != len(array) + 1:
        raise ValueError(
            f"{label}: its metadata promises {len(array)} values; the file is damaged, write it again"
        )
    null = None
    if validity is not None and array.null_count:
        null = np.asarray(array.is_null())
    return Column(_bytes(data), memory, null)


@contextlib.contextmanager
def readable(file: File, sequential: bool = False) -> Iterator[Any]:
    """The `pyarrow.NativeFile` of a file. Arguments are those of `File.open`."""
    with file.open(sequential) as opened:
        yield require("pyarrow", "arrow").PythonFile(opened, mode="r")


@contextlib.contextmanager
def naming_file(path: object, form: str, remedy: str) -> Iterator[None]:
    """Turn errors of pyarrow inside a `with` block, few of which name the file, into errors that do.

    Args:
      path: of the file.
      form: the format that it should have.
      remedy: a change that works.
    """
    pyarrow = require("pyarrow", "arrow")
    try:
        yield
    except FileNotFoundError:
        raise
    except (ValueError, OSError, MemoryError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
            raise OSError(error.errno, f"{path} cannot be read: {error.strerror}", str(path)) from error
        raise ValueError(
            f"{path} cannot be read as {form}: {error}. It may be truncated or another format; {remedy}"
        ) from error
