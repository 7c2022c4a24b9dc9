"""Parquet files as groups of rows: a column of a row group is read at once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.loader import arrow, digests, extras
from feedline.loader.declared import Declared
from feedline.loader.groups import GroupedFile

Array = npt.NDArray[Any]


def grouped(path: Path, declared: Declared) -> GroupedFile:
    """The row groups of a file.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
    """
    parquet = extras.need("pyarrow.parquet", "parquet")
    file = _opened(path)
    metadata, schema = file.metadata, file.schema_arrow
    file.close()
    spec = arrow.spec_of(schema, declared, str(path))
    names = sorted(spec)
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def read(leaf: int, group: int) -> Array:
        # a reader is not for many threads; with the footer parsed already a new one is cheap
        with parquet.ParquetFile(path, metadata=metadata, memory_map=True, pre_buffer=False) as reader:
            column = reader.read_row_group(group, columns=[names[leaf]], use_threads=False).column(0)
        parts = [arrow.rows_of(chunk, names[leaf]) for chunk in column.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return GroupedFile(spec, [lengths] * len(names), read, functools.partial(digests.of_file, path))


def _opened(path: Path) -> Any:
    pyarrow, parquet = extras.need("pyarrow", "parquet"), extras.need("pyarrow.parquet", "parquet")
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a Parquet file: {error}. It may be truncated or another format; write it "
            "again with pyarrow.parquet.write_table"
        ) from error
