"""Makes a `Source` from what a user passes. Modules for files, stores and records are imported on first use."""

from __future__ import annotations

import os
import sys
from typing import Any

import grain
import jax

from feedline._src.errors import RowError, warn
from feedline._src.plan.asked import SourceMetadata
from feedline._src.rows.source import EncodedSource, Source, UserSource, is_row_source, why_not_a_source
from feedline._src.rows.values import is_batched, is_in_memory, is_list, is_table
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.lanes import FirstItem, Lanes, is_stream

_BATCHED = (
    "each element of a Grain dataset is one row of the feed's batch, and this dataset ends with batch(), so a "
    "batch gets two leading axes; leave batch() out, or pass its batches to feedline.prefetch_to_mesh"
)
_READ_ROW_BY_ROW = (
    "a datasets.Dataset is read row by row, in Python; feedline.open_source(dataset) reads the memory of its "
    "Arrow files, many times as fast, in the dtypes that are stored there. To read row by row without this "
    "warning, pass grain.MapDataset.source(dataset) and order=feedline.Order()"
)


def as_source(source: Any) -> Source:
    """The `Source` for what a user passes. A `Source` is returned as it is.

    Raises:
      TypeError: `source` is a stream, which has no random access, or an object from which rows cannot be read.
    """
    if isinstance(source, Source):
        return source
    if source is None:
        raise TypeError("a source is a tree of arrays, a path or an object with rows, got None; pass one of them")
    if is_stream(source):
        raise TypeError(f"a stream has no rows with random access, got {type(source).__name__}; pass it to Feed")
    if isinstance(source, type):
        raise TypeError(f"a source is an object, got the class {source.__name__}; pass {source.__name__}(...)")
    if isinstance(source, str | bytes | os.PathLike):
        return open_arrays(source)
    if isinstance(source, grain.MapDataset):
        from feedline._src.sources.records import RecordSource

        if is_batched(source):
            warn(_BATCHED)
        return RecordSource(source)
    if isinstance(source, EncodedSource):
        raise TypeError(_why_not_arrays(source))
    if is_row_source(source):
        return UserSource(source)
    if "datasets" in sys.modules:
        from feedline._src.sources.hugging_face import is_dataset

        if is_dataset(source) and source.format["type"] != "custom":  # it has no transform
            warn(_READ_ROW_BY_ROW)
    # some subclasses of dict and tuple are leaves for JAX, and may be datasets
    is_tree = isinstance(source, dict | tuple) and not jax.tree_util.all_leaves([source])
    if not is_table(source):
        if is_tree or is_list(source) or is_in_memory(source):
            return ArraySource([source])
        if callable(getattr(source, "__len__", None)) and callable(getattr(source, "__getitem__", None)):
            return _of_records(source)
        if not jax.tree_util.all_leaves([source]):
            return ArraySource([source])
    raise TypeError(why_not_a_source(source))


def open_arrays(path_or_glob: str | bytes | os.PathLike[str]) -> Source:
    """Open files whose rows are arrays. TypeError: their rows are bytes, which must be decoded."""
    from feedline._src.sources.open_source import open_source

    source = open_source(path_or_glob)
    if isinstance(source, EncodedSource):
        source.close()
        raise TypeError(_why_not_arrays(source))
    return source


def _why_not_arrays(source: EncodedSource) -> str:
    return (
        f"a feed reads arrays, but rows of {source!r} are bytes; say how they are decoded: "
        "feedline.decoded(source, decode, spec), or for images feedline.images.decode(source)"
        f"{source.instead}"
    )


def _of_records(source: Any) -> Source:
    """The source for an object with `__len__` and `__getitem__`. TypeError: its `__getitem__` takes names."""
    from feedline._src.sources.records import RecordSource

    try:
        return RecordSource(grain.MapDataset.source(source), shuffled=True)
    except RowError as error:
        if not callable(getattr(source, "keys", None)):
            raise
        raise TypeError(
            f"rows are read by row index, but {type(source).__name__} has names: {error.message}; pass one array, "
            "source[name], or all arrays, {name: source[name][...] for name in source}, or the path of a .npz or "
            ".zarr"
        ) from error


def opened(source: Any) -> Source:
    """Like `as_source`, but a stream becomes a `FirstItem`, a source whose only row is the first item."""
    if not is_stream(source):
        return as_source(source)
    if is_batched(source):
        warn(_BATCHED)
    return FirstItem(Lanes.of(source))


def opened_metadata(source: Any) -> SourceMetadata:
    """The metadata of a user's source. The source is closed if it was opened here.

    Raises:
      ValueError, TypeError, OSError: `source` is not a source, has no rows, or names a file that does not exist.
      FeedError: the spec can be known only from a row, and this row cannot be read.
    """
    found = opened(source)
    try:
        return SourceMetadata.of(found)
    finally:
        if found is not source:
            found.close()
