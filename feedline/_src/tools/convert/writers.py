"""Writers of the formats. Each gives a function that appends the next rows to the file of a shard."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.sources.formats import extras
from feedline._src.tools.convert.columns import NAMELESS, Columns, Kind, Kinds
from feedline._src.tools.convert.comparison import as_bytes
from feedline._src.tools.convert.formats import FormatName, path_of, row_dtype

Array = npt.NDArray[Any]
_NPY_ALIGNMENT = 64
Append = Callable[[Columns], None]
Writer = Callable[[Path, Kinds, int, int], contextlib.AbstractContextManager[Append]]
"""(path, kinds, rows of the file, rows of a chunk) → in a `with` block, the function that appends a chunk."""


def _packed(columns: Columns, kinds: Kinds) -> npt.NDArray[np.uint8]:
    """uint8[k, bytes of a row]: the leaves of each row one after the other."""
    if NAMELESS in kinds:
        (only,) = columns.values()
        assert isinstance(only, np.ndarray)
        return as_bytes(only)
    rows = np.empty(len(next(iter(columns.values()))), row_dtype(kinds))
    for name, column in columns.items():
        *groups, last = path_of(name, kinds[name])
        inside = rows
        for group in groups:
            inside = inside[group]
        inside[last] = column
    return as_bytes(rows)


@contextlib.contextmanager
def _npy(path: Path, kinds: Kinds, rows: int, _: int) -> Iterator[Append]:
    row = row_dtype(kinds)
    described = {
        "descr": np.lib.format.dtype_to_descr(row.base),
        "fortran_order": False,
        "shape": (rows, *row.shape),
    }
    text = repr(described).encode()
    magic = np.lib.format.magic(3, 0)  # names in UTF-8; NumPy's public functions write versions 1 and 2 only
    padding = -(len(magic) + 4 + len(text) + 1) % _NPY_ALIGNMENT
    header = text + b" " * padding + b"\n"

    # not by a memory map: under one, a full disk ends the process with SIGBUS
    with path.open("xb") as file:
        file.write(magic + len(header).to_bytes(4, "little") + header)

        def append(columns: Columns) -> None:
            file.write(_packed(columns, kinds).reshape(-1).data)

        yield append


@contextlib.contextmanager
def _array_record(path: Path, kinds: Kinds, _rows: int, _: int) -> Iterator[Append]:
    module = extras.require("array_record.python.array_record_module", "array-record")
    writer = module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")

    def append(columns: Columns) -> None:
        only = next(iter(columns.values()))
        for record in only if isinstance(only, list) else map(bytes, _packed(columns, kinds)):
            writer.write(record)

    try:
        yield append
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error is the cause
            writer.close()
        raise
    writer.close()


@contextlib.contextmanager
def _zarr(path: Path, kinds: Kinds, rows: int, rows_per_chunk: int) -> Iterator[Append]:
    tensorstore = extras.require("tensorstore", "zarr")
    if NAMELESS not in kinds:
        path.mkdir()
        (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))

    def created(name: str, kind: Kind) -> Any:
        folder = os.path.join(path.absolute(), name, "")
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": folder},
            "store_data_equal_to_fill_value": True,
        }
        chunk = [min(rows, rows_per_chunk), *(max(1, size) for size in kind.shape)]
        return tensorstore.open(
            spec,
            create=True,
            dtype=tensorstore.dtype(kind.dtype),
            shape=[rows, *kind.shape],
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
        ).result()

    arrays = {name: created(name, kind) for name, kind in kinds.items()}
    start = 0

    def append(columns: Columns) -> None:
        nonlocal start
        count = len(next(iter(columns.values())))
        for name, array in arrays.items():
            array[start : start + count].write(columns[name]).result()
        start += count

    yield append


@contextlib.contextmanager
def _parquet(path: Path, kinds: Kinds, _rows: int, _: int) -> Iterator[Append]:
    pyarrow, parquet = extras.require("pyarrow", "parquet"), extras.require("pyarrow.parquet", "parquet")
    names = [name or "record" for name in kinds]  # a table of one column of bytes is read as its bytes
    schema = pyarrow.schema(list(zip(names, map(_arrow_type, kinds.values()), strict=True)))
    # Parquet stores narrow integers as 32 bits each; with a dictionary they take 8 or 16, and are read faster
    narrow = [
        name if not kind.shape else f"{name}.list.element"
        for name, kind in kinds.items()
        if kind.dtype is not None and kind.dtype.kind in "iu" and kind.dtype.itemsize < 4
    ]
    settings = {"compression": "NONE", "use_dictionary": narrow, "write_statistics": False}
    with parquet.ParquetWriter(path, schema, **settings) as writer:

        def append(columns: Columns) -> None:
            arrays = [_arrow_array(columns[name], kind) for name, kind in kinds.items()]
            writer.write_table(pyarrow.table(arrays, schema), row_group_size=max(1, len(arrays[0])))

        yield append


def _arrow_type(kind: Kind) -> Any:
    pyarrow = extras.require("pyarrow", "parquet")
    if kind.dtype is None:
        return pyarrow.large_binary()
    value = pyarrow.from_numpy_dtype(kind.dtype)
    if not kind.shape:
        return value
    if len(kind.shape) > 1:
        return pyarrow.fixed_shape_tensor(value, kind.shape)
    return pyarrow.binary(*kind.shape) if kind.dtype == np.uint8 else pyarrow.list_(value, *kind.shape)


def _arrow_array(column: Array | list[bytes], kind: Kind) -> Any:
    pyarrow, form = extras.require("pyarrow", "parquet"), _arrow_type(kind)
    if isinstance(column, list) or not kind.shape:
        return pyarrow.array(column, form)
    if pyarrow.types.is_fixed_size_binary(form):
        return pyarrow.Array.from_buffers(form, len(column), [None, pyarrow.py_buffer(column)])
    values = pyarrow.array(column.reshape(-1))
    if len(kind.shape) == 1:
        return pyarrow.FixedSizeListArray.from_arrays(values, type=form)
    return pyarrow.ExtensionArray.from_storage(
        form, pyarrow.FixedSizeListArray.from_arrays(values, type=form.storage_type)
    )


WRITERS: dict[FormatName, Writer] = {
    "array_record": _array_record,
    "npy": _npy,
    "parquet": _parquet,
    "zarr": _zarr,
}
