"""Arrow columns as NumPy rows, and Arrow IPC (Feather) files: mapped where they are not compressed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline.loader import digests, extras
from feedline.loader.declared import Declared
from feedline.loader.groups import GroupedFile

Array = npt.NDArray[Any]
SUFFIXES = (".arrow", ".feather")


def rows_of(column: Any, name: str) -> Array:
    """A column as an array of rows, a view of its buffer where that is possible (booleans are unpacked).

    Args:
      column: a `pyarrow.Array`.
      name: of the column, for errors.

    Raises:
      ValueError: it has nulls.
    """
    if column.null_count:
        raise ValueError(
            f"column {name!r} has {column.null_count} nulls, which no array of numbers holds; write it again with "
            "pyarrow.compute.fill_null, or leave it out with columns=[...]"
        )
    kind, types = column.type, extras.need("pyarrow", "arrow").types
    if isinstance(kind, extras.need("pyarrow", "arrow").BaseExtensionType):
        return rows_of(column.storage, name).reshape(len(column), *row_of(kind, name).shape)
    if types.is_fixed_size_binary(kind):
        start = column.offset * kind.byte_width
        taken = np.frombuffer(column.buffers()[1], np.uint8, len(column) * kind.byte_width, start)
        return taken.reshape(len(column), kind.byte_width)
    if types.is_fixed_size_list(kind):
        values = rows_of(column.flatten(), name)
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    return np.asarray(column.to_numpy(zero_copy_only=not types.is_boolean(kind)))


def row_of(kind: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one row of a column of that `pyarrow.DataType`.

    Raises:
      TypeError: its rows are no numbers, or differ in length.
    """
    pyarrow = extras.need("pyarrow", "arrow")
    types = pyarrow.types
    if isinstance(kind, pyarrow.FixedShapeTensorType) and kind.permutation in (
        None,
        sorted(kind.permutation or []),
    ):
        return jax.ShapeDtypeStruct(tuple(kind.shape), row_of(kind.value_type, name).dtype)
    if types.is_fixed_size_binary(kind):
        return jax.ShapeDtypeStruct((kind.byte_width,), np.dtype(np.uint8))
    if types.is_fixed_size_list(kind):
        inner = row_of(kind.value_type, name)
        return jax.ShapeDtypeStruct((kind.list_size, *inner.shape), inner.dtype)
    if types.is_boolean(kind):
        return jax.ShapeDtypeStruct((), np.dtype(np.bool_))
    if types.is_integer(kind) or types.is_floating(kind):
        letter = "f" if types.is_floating(kind) else "i" if types.is_signed_integer(kind) else "u"
        return jax.ShapeDtypeStruct((), np.dtype(f"{letter}{kind.bit_width // 8}"))
    raise TypeError(
        f"column {name!r} must have rows of one size that are numbers, got {kind}; cast it (lists of one length: "
        "pyarrow.list_(type, length); times: int64; bytes of one length: pyarrow.binary(length)), tokenise it, or "
        "leave it out with columns=[...]"
    )


def spec_of(schema: Any, declared: Declared, of: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The spec of the chosen columns of a schema."""
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise ValueError(f"columns must have different names, {of} has {sorted(twice)[0]!r} twice; rename one")
    return {name: row_of(schema.field(name).type, name) for name in declared.chosen(schema.names, of)}


def is_mapped(path: Path) -> bool:
    """Whether the buffers of a file are used where they lie: it is not compressed."""
    reader, memory = _opened(path)
    whole = memory.read_buffer()
    for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)):
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer and buffer.size]
        if buffers:
            return all(whole.address <= buffer.address < whole.address + whole.size for buffer in buffers)
    return True


def mapped(path: Path, declared: Declared) -> list[dict[str, Array]]:
    """The record batches of an uncompressed file as views of it.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
    """
    reader, _ = _opened(path)
    spec = spec_of(reader.schema, declared, str(path))
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    try:
        trees = [{name: rows_of(batch.column(name), name) for name in spec} for batch in batches]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return trees or [{name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}]


def grouped(path: Path, declared: Declared) -> GroupedFile:
    """The record batches of a compressed file, each decompressed when it is read."""
    ipc = extras.need("pyarrow.ipc", "arrow")
    reader, _ = _opened(path)
    spec = spec_of(reader.schema, declared, str(path))
    lengths = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    places = {name: reader.schema.get_field_index(name) for name in sorted(spec)}

    def read(leaf: int, group: int) -> Array:
        name, place = list(places.items())[leaf]
        only, _ = _opened(path, ipc.IpcReadOptions(included_fields=[place]))
        return rows_of(only.get_batch(group).column(0), name)

    return GroupedFile(spec, [lengths] * len(spec), read, functools.partial(digests.of_file, path))


def _opened(path: Path, options: Any = None) -> tuple[Any, Any]:
    """A reader of record batches, and the mapped file."""
    pyarrow, ipc = extras.need("pyarrow", "arrow"), extras.need("pyarrow.ipc", "arrow")
    try:
        memory = pyarrow.memory_map(str(path))
        return ipc.open_file(memory, options=options), memory
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"{path} cannot be read as an Arrow file: {error}. It may be truncated, or an Arrow stream, which "
            "has no index; write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"
        ) from error
