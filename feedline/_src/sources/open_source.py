"""What a feed reads: a path, a glob or an object, as a source. Formats and stores are imported on first use."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grain
import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError, warn
from feedline._src.formats.open_options import CACHE_BYTES, Decode, OpenOptions
from feedline._src.plan.asked import SourceMetadata
from feedline._src.rows.row_source import is_row_source, why_not_a_source
from feedline._src.rows.source import Source, UserSource
from feedline._src.rows.values import is_in_memory, is_list, is_table
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.lanes import FirstItem, Lanes, is_stream

if TYPE_CHECKING:
    from feedline._src.files.store import Store
    from feedline._src.formats.hugging_face import HuggingFaceDataset
    from feedline._src.rows.encoded_source import EncodedRows, EncodedSource

_READ_ROW_BY_ROW = (
    "a datasets.Dataset is read row by row, in Python; feedline.open_source(dataset) reads the memory of its "
    "Arrow files, many times as fast, in the dtypes that are stored there. To read row by row without this "
    "warning, pass grain.MapDataset.source(dataset) and order=feedline.Order()"
)


def open_source(
    path_or_glob: str | bytes | os.PathLike[str] | HuggingFaceDataset,
    *,
    dtype: npt.DTypeLike | None = None,
    window: int | None = None,
    stride: int | None = None,
    columns: Sequence[str] | None = None,
    decode: Decode | None = None,
    cache_bytes: int = CACHE_BYTES,
    missing_chunks: Literal["error", "fill"] = "error",
    store: Store | None = None,
) -> Source | EncodedRows:
    """The rows of a file, or of all files that a glob matches, in the sorted order of their names.

    The suffix names the format: `.npy`, `.npz`, `.bin` (raw), `.idx` (of Megatron-LM, with the tokens in the
    `.bin` beside it), `.array_record`, `.parquet`, `.arrow` or `.feather`, `.csv` or `.tsv`, `.jsonl` or
    `.ndjson`, `.h5` or `.hdf5`, `.lmdb`, `.zarr`. Files of one array give batches that are one array, all others
    dicts by name.

    Rows may also be bytes, which `feedline.decoded` makes arrays of: records of TFRecord files (`.tfrecord`, or
    names such as train-00000-of-00128), of ArrayRecord files without `dtype` and `decode`, and of tar archives
    (`.tar`); tables, JSON lines and HDF5 files with columns of bytes or text; and whole files: those of a folder,
    of its class folders ("photos/cat/1.jpg", with labels), or of a glob with another suffix ("photos/*.jpg").

    Args:
      path_or_glob: a file, or a glob of files of one format, whose rows follow each other; or a folder of files;
        or an object in a store, "s3://bucket/train/*.npy". Or a `datasets.Dataset` of Hugging Face, whose Arrow
        memory is read: see docs/hugging_face.md.
      dtype: the type of one element of a `.bin` file, or of one ArrayRecord record. A structured dtype gives a
        dict of its fields: `np.dtype([("image", np.uint8, (32, 32, 3)), ("label", np.int32)])`.
      window: rows are windows of that many adjacent elements (tokens) of a `.npy`, `.npz`, `.bin` or `.idx` file.
        They never cross the border of a file; elements after the last whole window are left out.
      stride: from the start of one window to that of the next, 1 to `window`, which is the default: windows
        that follow each other. Smaller ones overlap.
      columns: the names of the leaves to read; None: all. To an array without a name it gives one.
      decode: for ArrayRecord records that no dtype describes: (list of k records as bytes) → tree of arrays
        whose first axes are k. Called from many threads; row i must depend only on record i. With workers it
        must pickle.
      cache_bytes: host memory for groups of rows that are stored together (Parquet row groups, compressed Arrow
        batches, chunks of Zarr and HDF5), which are read whole. To read each group once, it must hold the groups
        of adjacent positions of the order: for a blocked order, window × bytes of a block. A single group may be
        larger. Each thread that reads a batch holds up to as many bytes in addition.
      missing_chunks: in a Zarr array: "error", or "fill" for rows of the fill value in its metadata. Some writers
        (zarr-python, unless told otherwise) leave out chunks that hold only that value. With "fill" a lost
        chunk cannot be distinguished from one that was left out.
      store: the cache on local disk and the patience for objects in a store: `s3://`, `gs://`, `az://`, `https://`.

    Raises:
      FileNotFoundError: no such file, or no match.
      ValueError: an empty path or an address of no store, truncated, another format, files that do not fit
        together, or an option of another format.
      TypeError: a column is not numeric, or it is no path.
      ImportError: the format needs a library that is not installed; the error says how to install it.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> for shard in range(2):
      ...     np.arange(10, dtype=np.uint16).tofile(folder / f"tokens-{shard}.bin")
      >>> source = open_source(folder / "tokens-*.bin", dtype=np.uint16, window=5, stride=4)
      >>> len(source), source.spec
      (4, ShapeDtypeStruct(shape=(5,), dtype=uint16))
      >>> source[-1]
      array([4, 5, 6, 7, 8], dtype=uint16)
    """
    from feedline._src.files.folder import matches
    from feedline._src.files.store import Store, Url, is_url
    from feedline._src.formats.hugging_face import is_dataset
    from feedline._src.formats.registry import all_formats
    from feedline._src.sources.datasets import open_dataset
    from feedline._src.sources.file_formats import FILES, format_of_paths, open_files

    options = OpenOptions(dtype, window, stride, columns, decode, cache_bytes, missing_chunks, store)
    if is_dataset(path_or_glob):
        return open_dataset(path_or_glob, options)
    if not isinstance(path_or_glob, str | bytes | os.PathLike):
        as_source(path_or_glob)  # the error of a feed, if it takes no such object either
        raise TypeError(
            f"open_source takes a path, a glob or a datasets.Dataset, got a {type(path_or_glob).__name__}, which "
            "need not be opened; pass it to the feed as it is: feedline.Feed(source, ...)"
        )
    name: str = os.fsdecode(path_or_glob)
    listed = matches(name, store or Store()) if is_url(name) else None
    if listed is not None:
        paths = [str(each.url) for each in listed]
    else:
        paths = [str(Url.parse(name))] if is_url(name) else _matches(name)
    form = format_of_paths(paths, listed is not None or paths != [name], store)
    for option in sorted(options.given() - form.takes - {"store"}):
        takers = [suffix for other in all_formats() if option in other.takes for suffix in other.suffixes]
        raise ValueError(f"{option} is for {', '.join(takers)}, got it with {paths[0]}; leave it out")
    if listed is not None and form is FILES:
        from feedline._src.sources.folder import open_files as open_each

        return open_each(listed, store)
    return open_files(form, paths, options)


def _matches(name: str) -> list[str]:
    from feedline._src.files.store import SCHEMES

    if not name:
        raise ValueError("a path must name a file or a folder, and is empty; the working directory is '.'")
    scheme, separator, _ = name.partition("://")
    if separator and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        stores = ", ".join(f"{each}://" for each in SCHEMES)
        raise ValueError(f"stores are read by addresses with {stores}, got {name}; give a local file by its path")
    if not glob.has_magic(name) or Path(name).exists():
        return [name]
    matches = sorted(glob.glob(name, recursive=True))
    if not matches:
        raise FileNotFoundError(f"no file matches {name}; check the folder and the pattern")
    return matches


def as_source(source: Any) -> Source:
    """The `Source` for what a user gives. It is the object itself if that is a `Source`.

    Raises:
      TypeError: rows cannot be read from it; or it is a stream, which has no random access.
    """
    if isinstance(source, Source):
        return source
    if is_stream(source):
        raise TypeError(f"a stream has no rows with random access, got {type(source).__name__}; feed it as it is")
    if isinstance(source, type):
        raise TypeError(f"a source is an object, got the class {source.__name__}; pass {source.__name__}(...)")
    if isinstance(source, grain.MapDataset):
        from feedline._src.sources.records import RecordSource

        return RecordSource(source)
    if isinstance(source, str | bytes | os.PathLike):
        return open_arrays(source)
    if hasattr(source, "fields") and hasattr(source, "records"):
        from feedline._src.rows.encoded_source import is_encoded_source

        if is_encoded_source(source):
            raise TypeError(_why_not_arrays(source))
    if is_row_source(source):
        return UserSource(source)
    if is_table(source):
        raise TypeError(
            f"a table is no source, but its numeric columns are, got a {type(source).__name__}; pass "
            "{name: table[name] for name in names}"
        )
    # some subclasses of dict and tuple are no trees for JAX, and may be data sets
    is_tree = isinstance(source, dict | tuple) and not jax.tree_util.all_leaves([source])
    if is_tree or is_list(source) or is_in_memory(source):
        return ArraySource([source])
    if _is_plain_dataset(source):
        warn(_READ_ROW_BY_ROW)
    if callable(getattr(source, "__len__", None)) and callable(getattr(source, "__getitem__", None)):
        return _of_records(source)
    if jax.tree_util.all_leaves([source]):
        raise TypeError(why_not_a_source(source))
    return ArraySource([source])


def open_arrays(path_or_glob: str | bytes | os.PathLike[str]) -> Source:
    """Open files whose rows are arrays.

    Raises:
      TypeError: they are bytes, which must be decoded.
    """
    source = open_source(path_or_glob)
    if isinstance(source, Source):
        return source
    source.close()
    raise TypeError(_why_not_arrays(source))


def _why_not_arrays(source: EncodedSource) -> str:
    return (
        f"a feed reads arrays, and rows of {source!r} are bytes; say how they are decoded: "
        "feedline.decoded(source, decode, spec), or for images feedline.images.decode(source)"
        f"{getattr(source, 'instead', '')}"
    )


def _is_plain_dataset(source: Any) -> bool:
    """Whether this is a `datasets.Dataset` without a function of the user's that makes its rows."""
    if "datasets" not in sys.modules:
        return False
    from feedline._src.formats.hugging_face import is_dataset

    return is_dataset(source) and source.format["type"] != "custom"


def _of_records(source: Any) -> Source:
    """The source for an object with `__len__` and `__getitem__`.

    Raises:
      TypeError: it is indexed by names.
    """
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


def read_first(source: Source, out: Any) -> None:
    """Read the first row, which a transform is given when a feed is built.

    Args:
      out: as in `RowSource.read`.

    Raises:
      RowError: it cannot be read.
    """
    try:
        source.read(np.zeros(1, np.int64), out)
    except FeedError:
        raise
    except Exception as error:
        raise RowError(
            "a transform is given the first row when the feed is built, to learn its spec, and "
            f"{source.kind} failed to read it with {type(error).__name__}: {error}",
            stage="read",
            row=0,
        ) from error


def opened_metadata(source: Any) -> SourceMetadata:
    """The metadata of a user's source, which is closed if it was opened here.

    Raises:
      ValueError, TypeError, OSError: it is no source, there is no such file, or it has no rows.
      FeedError: only a row tells its spec, and that row cannot be read.
    """
    if is_stream(source):
        lanes = Lanes.of(source)
        return SourceMetadata(FirstItem(lanes).spec, None, lanes.count)
    opened = as_source(source)
    try:
        return SourceMetadata.of(opened)
    finally:
        if opened is not source:
            opened.close()
