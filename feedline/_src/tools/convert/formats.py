"""Chooses a file format, writes rows as a file, opens the file, and compares it with what was written."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.formats.registry import require
from feedline._src.sources.open_source import open_source
from feedline._src.tools.convert.rows import Rows

FormatName = Literal["array_record", "npy", "parquet", "zarr"]
Chunks = Iterable[npt.NDArray[Any]]
"""Arrays of adjacent rows. If leaves have names, each is a field."""
_FASTEST: tuple[FormatName, ...] = ("npy", "array_record", "parquet")
"""From fast to slow reading; the first that can hold the rows is the default."""


def choose_format(name: str | None, rows: Rows) -> FormatName:
    """The format with this name; None: of the formats that can hold the rows, the one that is read fastest.

    To test a format, the first row is written to a temporary folder. TypeError: no tested format can hold it.
    """
    chosen = [each for each in get_args(FormatName) if each == name] if name is not None else _FASTEST
    if not chosen:
        raise ValueError(f"format must be one of {', '.join(get_args(FormatName))}, got {name!r}")
    rows.read(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        for form in chosen:
            path = Path(folder, f"row.{form}")
            try:
                write_file(path, form, rows, range(1), 1)
                return form
            except (TypeError, ValueError, NotImplementedError, FeedError) as error:  # from the format's library
                refused = error
    raise TypeError(
        f"{form} cannot hold these rows: {str(refused).replace(str(path), 'a file of the first row')}; npy and "
        "zarr hold arrays, array_record holds arrays or bytes, parquet holds columns with names; choose another "
        "format, name an array with columns=['x'], or decode bytes into arrays with feedline.decoded"
    ) from refused


def write_file(path: Path, form: FormatName, rows: Rows, span: range, chunk_rows: int) -> None:
    """Write some rows as one file, and read it back from the disk. FeedError: the file holds other rows."""
    wanted, found = hashlib.sha256(), hashlib.sha256()
    _WRITERS[form](path, rows.dtype, rows.chunks(span, chunk_rows, wanted), len(span), chunk_rows)
    for file in [path, *path.rglob("*")]:
        sync(file)
    with contextlib.closing(open_files(path, form, rows.dtype)) as source:
        for _ in same_rows(source, rows.dtype, len(span)).chunks(range(len(span)), chunk_rows, found):
            pass
    if wanted.digest() != found.digest():
        raise FeedError(
            f"rows must be read back as they were written, and rows {span.start} to {span.stop - 1} differ; check "
            "the disk and the memory of this machine, and run the conversion again"
        )


def open_files(files: Path | str, form: FormatName, row: np.dtype[Any]) -> Any:
    """The source of one file, or of all files that a glob matches."""
    return open_source(files, dtype=row if _needs_dtype(form, row) else None)


def same_rows(source: Any, row: np.dtype[Any], count: int) -> Rows:
    """The rows of `source`. Raises `FeedError` unless it has `count` rows of dtype `row`."""
    found = Rows.of(source) if len(source) else None
    if found is None or found.dtype != row or len(source) != count:
        raise FeedError(
            f"files must hold {count} rows of {row}, "
            f"but hold {len(source)} of {found.dtype if found else None}: "
            "a file is missing, was added, or was skipped by the given `map`; remove added files, or convert again"
        )
    return found


def open_line(pattern: str, form: FormatName, row: np.dtype[Any]) -> str:
    """The Python expression that opens the files.

    Example:
      >>> open_line("out/*.array_record", "array_record", np.dtype([("x", np.uint8, (3,))]))
      "feedline.open_source('out/*.array_record', dtype=np.dtype([('x', 'uint8', (3,))]))"
    """
    dtype = f", dtype=np.dtype({_described(row)!r})" if _needs_dtype(form, row) else ""
    return f"feedline.open_source({pattern!r}{dtype})"


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, and drop its cached pages, so the next read is from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if sys.platform == "linux" and path.is_file():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _needs_dtype(form: FormatName, row: np.dtype[Any]) -> bool:
    return form == "array_record" and not row.hasobject


def _described(row: np.dtype[Any]) -> Any:
    """The argument from which `numpy.dtype` makes `row`. In the repr of `row`, bfloat16 would lack its quotes."""
    if row.names is None:
        return row.base.name, row.shape
    described = {name: _described(row[name]) for name in row.names}
    return [(name, of) if isinstance(of, list) else (name, *of) for name, of in described.items()]


def _write_npy(path: Path, row: np.dtype[Any], chunks: Chunks, rows: int, _: int) -> None:
    if row.hasobject:
        raise TypeError("they have bytes of any length")
    mapped = np.lib.format.open_memmap(path, "w+", row.base, (rows, *row.shape), version=(3, 0))
    start = mapped.offset
    del mapped  # it only created the file: on a full disk, a write to the map would end the process by SIGBUS
    with path.open("r+b") as file:
        file.seek(start)
        for chunk in chunks:
            file.write(chunk.tobytes())


def _write_array_record(path: Path, row: np.dtype[Any], chunks: Chunks, _rows: int, _: int) -> None:
    if row.hasobject and row.names is not None:
        raise TypeError("they are records of several fields")
    module = require("array_record.python.array_record_module", "array-record")
    writer = module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    try:
        for chunk in chunks:
            for record in chunk:
                writer.write(record if row.hasobject else record.tobytes())
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error is the cause
            writer.close()
        raise
    writer.close()


def _write_zarr(path: Path, row: np.dtype[Any], chunks: Chunks, rows: int, chunk_rows: int) -> None:
    tensorstore = require("tensorstore", "zarr")
    if row.hasobject:
        raise TypeError("they have bytes of any length")
    if row.names is not None:
        path.mkdir()
        (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))

    def created(name: str, leaf: np.dtype[Any]) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": os.path.join(path.absolute(), name, "")},
            "store_data_equal_to_fill_value": True,
        }
        chunk = [min(rows, chunk_rows), *(max(1, size) for size in leaf.shape)]
        return tensorstore.open(
            spec,
            create=True,
            dtype=tensorstore.dtype(leaf.base),
            shape=[rows, *leaf.shape],
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
        ).result()

    arrays = {name: created(name, leaf) for name, leaf in _flat(row).items()}
    start = 0
    for chunk in chunks:
        stop = start + len(chunk)
        for name, array in arrays.items():
            array[start:stop].write(chunk[name] if name else chunk).result()
        start = stop


def _write_parquet(path: Path, row: np.dtype[Any], chunks: Chunks, _rows: int, _: int) -> None:
    pyarrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    if row.names is None and not row.hasobject:
        raise TypeError("they are arrays without a name")
    leaves = _flat(row)
    # Parquet stores narrow integers as 32 bits each; with a dictionary they take 8 or 16, and are read faster
    narrow = [
        f"{name}.list.element" if leaf.shape else name
        for name, leaf in leaves.items()
        if leaf.base.kind in "iu" and leaf.base.itemsize < 4
    ]

    def arrow(column: npt.NDArray[Any]) -> Any:
        column = np.ascontiguousarray(column)
        if column.dtype.hasobject:
            return pyarrow.array(column, pyarrow.large_binary())
        if column.ndim == 1:
            return pyarrow.array(column)
        if column.ndim == 2 and column.dtype == np.uint8:
            form = pyarrow.binary(column.shape[1])
            return pyarrow.Array.from_buffers(form, len(column), [None, pyarrow.py_buffer(column)])
        return pyarrow.FixedShapeTensorArray.from_numpy_ndarray(column)

    # the name "record" is arbitrary: a table with one column of bytes is read back as bytes without a name
    tables = (
        pyarrow.table({name or "record": arrow(chunk[name] if name else chunk) for name in leaves})
        for chunk in chunks
    )
    first = next(tables)
    settings = {"compression": "NONE", "use_dictionary": narrow, "write_statistics": False}
    with parquet.ParquetWriter(path, first.schema, **settings) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table, row_group_size=len(table))


def _flat(row: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
    """The leaves of a row by name, "" for a row that is one array. TypeError: a row contains another dict."""
    if row.names is None:
        return {"": row}
    inside = next((name for name in row.names if row[name].names is not None), None)
    if inside is not None:
        raise TypeError(f"{inside!r} is a dict in a row")
    return {name: row[name] for name in row.names}


_WRITERS: dict[FormatName, Callable[[Path, np.dtype[Any], Chunks, int, int], None]] = {
    "array_record": _write_array_record,
    "npy": _write_npy,
    "parquet": _write_parquet,
    "zarr": _write_zarr,
}
"""Each writer gets the path, a row's dtype, the chunks, and the numbers of rows in the file and in a chunk."""
