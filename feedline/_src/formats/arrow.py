"""Arrow IPC (Feather) files and streams. Parquet and CSV also use the conversion of pyarrow's columns to NumPy.

Uncompressed files on a local disk are mapped. From other files, pyarrow decodes one record batch at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library
from feedline._src.formats.table import Column, FileArray, Grouped, Leaf, few, naming_file

Array = npt.NDArray[Any]
pyarrow: Any = Library("pyarrow", "arrow")
ipc: Any = Library("pyarrow.ipc", "arrow")
_REWRITE = "write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"
_FILE_MARK = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


# --- columns ---


def is_bytes(kind: Any) -> bool:
    """Whether values of a `pyarrow.DataType` are bytes or text of any length, stored one after the other.

    False for views (`binary_view`), since a damaged view makes pyarrow read beyond the file and end the process.
    """
    return is_a(kind, "binary", "large_binary", "string", "large_string")


def is_a(kind: Any, *names: str) -> bool:
    """Whether `pyarrow.types.is_<name>` is true of a `pyarrow.DataType` for at least one of the names."""
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def leaf_of(kind: Any) -> Leaf | None:
    """The leaf for rows of a `pyarrow.DataType`; None if they are neither bytes nor numbers of one shape."""
    if is_bytes(kind):
        return "bytes"
    if is_a(kind, "fixed_size_binary"):
        return jax.ShapeDtypeStruct((kind.byte_width,), np.dtype(np.uint8))
    if is_a(kind, "boolean", "integer", "floating"):
        return jax.ShapeDtypeStruct((), np.dtype(kind.to_pandas_dtype()))
    permutation = getattr(kind, "permutation", None) or []  # of the axes of a tensor
    if isinstance(kind, pyarrow.FixedShapeTensorType) and permutation == sorted(permutation):
        shape = tuple(kind.shape)
    elif is_a(kind, "fixed_size_list"):
        shape = (kind.list_size,)
    else:
        return None
    inner = leaf_of(kind.value_type)
    if inner is None or isinstance(inner, str):  # lists of text
        return None
    return jax.ShapeDtypeStruct((*shape, *inner.shape), inner.dtype)


def column_of(array: Any) -> Column:
    """Convert a `pyarrow.Array` to views of its buffers. Booleans and nulls are unpacked from bits.

    The array must be validated, and `leaf_of` must return a leaf for its type.
    """
    kind, count = array.type, len(array)
    leaf: Any = leaf_of(kind)
    if isinstance(kind, pyarrow.BaseExtensionType):
        inner = column_of(array.storage)
        return inner._replace(values=inner.values.reshape(count, *leaf.shape))
    null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if is_bytes(kind):
        _, ends, data = array.buffers()
        dtype = np.dtype(np.int64 if is_a(kind, "large_binary", "large_string") else np.int32)
        return Column(_from(data), _from(ends, dtype, array.offset, count + 1), null)
    if is_a(kind, "fixed_size_list"):
        start, stop = array.offset * kind.list_size, (array.offset + count) * kind.list_size
        inner = column_of(array.values)
        if inner.null is not None and (within := inner.null[start:stop].reshape(count, -1).any(1)).any():
            null = within if null is None else null | within
        return Column(inner.values[start:stop].reshape(count, *leaf.shape), null=null)
    if is_a(kind, "boolean"):
        return Column(array.fill_null(False).to_numpy(zero_copy_only=False), null=null)
    width = math.prod(leaf.shape)
    found = _from(array.buffers()[1], leaf.dtype, array.offset * width, count * width)
    return Column(found.reshape(count, *leaf.shape), null=null)


def _from(buffer: Any, dtype: Any = np.uint8, first: int = 0, count: int = -1) -> Array:
    """`count` elements of a buffer (-1: all), from element `first` on. ValueError: the buffer has fewer."""
    if count == 0 or buffer is None or buffer.size == 0:  # there are no rows
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, count, first * np.dtype(dtype).itemsize)


_REMEDIES = {
    "dictionary": "take its codes: column.combine_chunks().indices",
    "string_view": "cast it: column.cast(pyarrow.string())",
    "binary_view": "cast it: column.cast(pyarrow.binary())",
    "date32": "cast it: column.cast(pyarrow.int32())",
    "time32": "cast it: column.cast(pyarrow.int32())",
    "duration": "cast it to a number of its units: column.cast(pyarrow.int64())",
    "temporal": "count time from a start, in a unit that fits int32: pc.seconds_between(pc.min(column), column)",
    "decimal": "cast it: column.cast(pyarrow.float64())",
    "list": "pad the lists to one length, and cast them: column.cast(pyarrow.list_(type, length))",
    "large_list": "pad the lists to one length, and cast them: column.cast(pyarrow.list_(type, length))",
    "struct": "flatten it: table.flatten()",
    "string": "tokenise it, or number its values: column.combine_chunks().dictionary_encode().indices",
}
"""How to turn a column into numbers, by the column's type in pyarrow. `pc` is `pyarrow.compute`."""


def _remedy(kind: Any) -> str:
    while is_a(kind, "fixed_size_list"):
        kind = kind.value_type
    return next((remedy for name, remedy in _REMEDIES.items() if is_a(kind, name)), "cast it to numbers")


def spec_of(schema: Any, options: OpenOptions, path: str) -> dict[str, Leaf]:
    """Return the leaf of each chosen column, in the order of the columns."""
    try:
        names: list[str] = schema.names
    except UnicodeDecodeError as error:
        raise ValueError(f"names of columns must be UTF-8, and in {path} they are not; write it again") from error
    twice = {name for name in names if names.count(name) > 1}
    if twice or not names:
        found = f"has {min(twice)!r} twice" if twice else "has none"
        raise ValueError(f"a file must have columns with different names, and {path} {found}; write it again")
    spec: dict[str, Leaf] = {}
    refused = []
    for name in (chosen := options.chosen(names, path)):
        kind = schema.field(name).type
        leaf = leaf_of(kind)
        if leaf is None:
            refused.append(f"{name!r} is {kind}: {_remedy(kind)}")
        elif min(getattr(leaf, "shape", ()), default=0) < 0:
            raise ValueError(f"column {name!r} of {path} has rows of type {kind}; the file is damaged")
        else:
            spec[name] = leaf
    if refused:
        leave = f", or leave them out: columns=[{few([repr(name) for name in spec], ', ')}]" if spec else ""
        raise TypeError(
            f"all columns must hold numbers of one shape, bytes or text, and {len(refused)} of the {len(chosen)} "
            f"columns of {path} do not. {few(refused, '; ')}. Convert them, and write the file again, as "
            f"docs/formats.md shows{leave}"
        )
    return spec


# --- files ---


@contextlib.contextmanager
def readable(file: File, sequential: bool = False) -> Iterator[Any]:
    """Open a file as a `pyarrow.NativeFile`. Arguments: see `File.open`."""
    if not file.in_store:
        file.check()
        # not a PythonFile, since Arrow's threads may free it; that takes the GIL, and so aborts an exiting process
        with pyarrow.OSFile(file.place) as opened:
            yield opened
        return
    with file.open(sequential) as opened:
        yield pyarrow.PythonFile(opened, mode="r")


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The record batches of a file or a stream: mapped if uncompressed on a local disk, else decoded."""
    with naming_file(file.name, "an Arrow file", _REWRITE):
        is_stream = file.samples([(0, len(_FILE_MARK))])[0] != _FILE_MARK
        with readable(file) as source:
            schema = (ipc.open_stream if is_stream else ipc.open_file)(source).schema
    spec = spec_of(schema, options, file.name)
    with naming_file(file.name, "an Arrow file", _REWRITE):
        mapped = None if file.in_store else _mapped(file, spec, is_stream)
        return mapped or _decoded(file, spec, schema, is_stream)


FORMAT = Format(
    "arrow", (".arrow", ".feather"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow", open=open_file
)


def _mapped(file: File, spec: dict[str, Leaf], is_stream: bool) -> Grouped | None:
    """The record batches as views of the mapped file; None if any of them is compressed."""
    names, batches = sorted(spec), list[dict[str, Column]]()
    memory = pyarrow.memory_map(file.place).read_buffer()
    for batch in _batches_of(pyarrow.BufferReader(memory), is_stream):
        batch.validate()  # invalid lengths would make pyarrow abort the process
        buffers = [buffer for name in names for buffer in batch.column(name).buffers() if buffer and buffer.size]
        if not all(0 <= buffer.address - memory.address <= memory.size - buffer.size for buffer in buffers):
            return None  # pyarrow has decompressed this batch into other memory
        batches.append({name: column_of(batch.column(name)) for name in names})

    def in_file(values: Array) -> FileArray | Array:
        """Turn a view of the mapped file into a `FileArray`; return others, such as unpacked booleans."""
        offset = values.ctypes.data - memory.address
        return FileArray.of(file, values.dtype, values.shape, offset) if 0 <= offset < memory.size else values

    def arrays() -> list[Any]:
        return [{name: in_file(column.values) for name, column in batch.items()} for batch in batches]

    nulls = {leaf: sum(batch[name].nulls for batch in batches) for leaf, name in enumerate(names)}
    has_bytes = any(isinstance(leaf, str) for leaf in spec.values())
    return Grouped(
        spec,
        [[batch[names[0]].rows for batch in batches]] * len(names),
        lambda leaf, group: batches[group][names[leaf]],
        in_place=True,
        nulls=nulls,
        arrays=None if has_bytes or any(nulls.values()) or not batches else arrays,
    )


def _batches_of(source: Any, is_stream: bool) -> Iterator[Any]:
    """Yield the record batches of a `pyarrow.NativeFile`, not yet validated."""
    if is_stream:  # datasets.save_to_disk writes streams
        yield from ipc.open_stream(source)
        _check_end(source)
    else:
        file = ipc.open_file(source)
        yield from map(file.get_batch, range(file.num_record_batches))


def _check_end(source: Any) -> None:
    """Raise ValueError if a stream was truncated between two record batches, since pyarrow accepts that."""
    end = source.tell()
    source.seek(max(0, end - len(END_OF_STREAM)))
    if end != source.size() or source.read() != END_OF_STREAM:
        raise ValueError("a stream must end with an end-of-stream marker, and this one does not")


def _decoded(file: File, spec: dict[str, Leaf], schema: Any, is_stream: bool) -> Grouped:
    """Read record batches without mapping the file, so that a failing disk causes an error instead of a SIGBUS."""
    names = sorted(spec)
    ends = _ends_in_stream(file) if is_stream else _ends_in_file(file)
    head = file.read(np.array([0]), np.array([ends[0]]))[0] if is_stream else b""  # schema and dictionaries

    def extent(group: int) -> tuple[int, int]:
        return ends[group], ends[group + 1] - ends[group]

    def batch_of(group: int, name: str) -> Any:
        """Read a record batch with only this column."""
        only = ipc.IpcReadOptions(included_fields=[schema.get_field_index(name)], use_threads=False)
        if is_stream:
            offset, length = np.array([extent(group)]).T
            message = head + file.read(offset, length)[0]
            batch = ipc.open_stream(pyarrow.BufferReader(message), options=only).read_next_batch()
        else:
            with readable(file) as source:
                batch = ipc.open_file(source, options=only).get_batch(group)
        batch.validate()  # invalid lengths would make pyarrow abort the process
        return batch

    def read(leaf: int, group: int) -> Column:
        name = names[leaf]
        # copied, since a view would keep alive all memory that pyarrow has read for this call
        return column_of(batch_of(group, name).column(name)).copied()

    def row_bytes(name: str) -> float:
        leaf = spec[name]
        return math.inf if isinstance(leaf, str) else math.prod(leaf.shape) * leaf.dtype.itemsize

    narrowest = min(names, key=row_bytes)
    lengths = [batch_of(group, narrowest).num_rows for group in range(len(ends) - 1)]
    return Grouped(spec, [lengths] * len(names), read, extents=lambda leaf, group: [extent(group)])


def _ends_in_file(file: File) -> list[int]:
    """Estimate the bounds of the record batches as if all had one length, since pyarrow does not report them."""
    with readable(file) as source:
        count = ipc.open_file(source).num_record_batches
    return [file.size * number // max(1, count) for number in range(count + 1)]


def _ends_in_stream(file: File) -> list[int]:
    """Return the start of the first record batch and the end of each. Reads the stream, since it has no index."""
    ends = [0]
    with readable(file, sequential=True) as source:
        messages = ipc.MessageReader.open_stream(source)
        with contextlib.suppress(StopIteration):
            while True:
                if messages.read_next_message().type == "record batch":
                    ends.append(source.tell())
                elif len(ends) == 1:
                    ends[0] = source.tell()
        _check_end(source)
    return ends
