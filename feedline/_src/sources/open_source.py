"""`open_source`: the rows of files at a path, a glob or an address. The suffix names the format."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy.typing as npt

from feedline._src.files.folder import local_matches, matches
from feedline._src.files.store import Store, Url, is_url
from feedline._src.formats import zarr
from feedline._src.formats.open_options import CACHE_BYTES, OpenOptions
from feedline._src.formats.registry import Format, formats, suffix_of
from feedline._src.rows.source import EncodedSource, Source, why_not_a_source
from feedline._src.rows.values import is_table
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.documents import open_tokens
from feedline._src.sources.folder import open_files, open_folder
from feedline._src.sources.groups import open_groups
from feedline._src.sources.hugging_face import (
    HuggingFaceDataset,
    check_no_cache,
    is_dataset,
    is_saved,
    open_dataset,
)

_FILES = Format("files", ())
"""For files whose suffix names no format: each file is one row."""
_FOLDER = Format("folder", ())
_SAVED = Format("saved", (), takes=frozenset({"columns"}))
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_TABLE = "convert a table to Parquet or Arrow once (read it with pyarrow.{0}.read_{0}; docs/formats.md)"
_TOKENS = "write text as .bin files of tokens once (docs/text.md#files-of-tokens)"
_TEXT = {
    ".json": f"{_TOKENS}, and {_TABLE.format('json')}, or write one object per line (.jsonl)",
    ".txt": f"{_TOKENS}, or give a folder or a glob of files that are one row each",
}
"""The advice in the error message for text files, whose rows can only be read in sequence."""


def open_source(
    path_or_glob: str | bytes | os.PathLike[str] | HuggingFaceDataset,
    *,
    dtype: npt.DTypeLike | None = None,
    window: int | None = None,
    stride: int | None = None,
    columns: Sequence[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    missing_chunks: Literal["error", "fill"] = "error",
    store: Store | None = None,
) -> Source | EncodedSource:
    """The rows of a file, or of all files that a glob matches, in the sorted order of their names.

    The suffix names the format: `.npy`, `.npz`, `.bin` (raw), `.idx` (of Megatron-LM, with the tokens in the
    `.bin` beside it), `.array_record`, `.parquet`, `.arrow` or `.feather`, `.csv` or `.tsv`, `.jsonl` or
    `.ndjson`, `.h5` or `.hdf5`, `.lmdb`, `.zarr`. Files of one array give batches that are one array; all other
    files give batches that are dicts by name.

    Rows may also be bytes, which `feedline.decoded` turns into arrays. A row is then a record of a TFRecord file
    (`.tfrecord`, or a name such as train-00000-of-00128), of an ArrayRecord file without `dtype` or of a tar
    archive (`.tar`); a row of a table, JSON lines or HDF5 file with columns of bytes or text; or a file of a
    folder, of its class folders (`photos/cat/1.jpg`, with labels) or of another glob (`photos/*.jpg`).

    Args:
      path_or_glob: a file, or a glob whose files have one format and are one source; or a folder of files;
        or any of these in a store, `s3://bucket/train/*.npy`. Or a `datasets.Dataset` of Hugging Face, whose Arrow
        memory is read: see docs/formats.md.
      dtype: the type of one element of a `.bin` file, or of one ArrayRecord record. A structured dtype gives a
        dict of its fields: `np.dtype([("image", np.uint8, (32, 32, 3)), ("label", np.int32)])`.
      window: rows are windows of that many adjacent elements (tokens) of a `.npy`, `.npz`, `.bin` or `.idx` file.
        They never cross the border of a file; elements after the last whole window are left out.
      stride: the distance between the starts of adjacent windows, 1 to `window`. The default, `window`, gives
        windows without overlap; with a smaller stride they overlap.
      columns: the names of the leaves to read; None: all. An array that has no name gets the name given here.
      cache_bytes: bytes of host memory for a cache of groups of rows (Parquet row groups, compressed Arrow
        batches, chunks of Zarr and HDF5), which are always read whole. With `Blocks`, each group is read once per
        epoch if the cache holds the groups of a window: `Blocks.window` × bytes of a block. A single group may
        exceed the limit. Each thread that reads may hold `cache_bytes` more.
      missing_chunks: for chunks that a Zarr array lacks: "error", or "fill", which reads the fill value in the
        metadata. Some writers (zarr-python, unless told otherwise) leave out chunks that hold only this value.
        With "fill", a lost chunk cannot be distinguished from one that was left out.
      store: for objects in a store (`s3://`, `gs://`, `az://`, `https://`): the cache on local disk, and how long
        failed requests are repeated.

    Raises:
      FileNotFoundError: there is no such file, or the glob has no match.
      ValueError: the path is empty, or an unknown kind of address; a file is truncated, or in another format than
        its suffix says; files do not fit together; or an option belongs to another format.
      TypeError: a column is not numeric, or `path_or_glob` is neither a path nor a dataset.
      ImportError: the format needs a library that is not installed; the error says how to install it.

    Example:
      >>> import tempfile, numpy as np
      >>> folder = Path(tempfile.mkdtemp())
      >>> for shard in range(2):
      ...     np.arange(10, dtype=np.uint16).tofile(folder / f"tokens-{shard}.bin")
      >>> source = open_source(folder / "tokens-*.bin", dtype=np.uint16, window=5, stride=4)
      >>> len(source), source.spec
      (4, ShapeDtypeStruct(shape=(5,), dtype=uint16))
      >>> source[-1]
      array([4, 5, 6, 7, 8], dtype=uint16)
    """
    options = OpenOptions(dtype, window, stride, columns, cache_bytes, missing_chunks, store)
    if is_dataset(path_or_glob):
        return open_dataset(path_or_glob, options)
    if not isinstance(path_or_glob, str | bytes | os.PathLike):
        raise TypeError(
            why_not_a_source(path_or_glob)
            if is_table(path_or_glob)
            else f"open_source takes a path, a glob or a datasets.Dataset, got a {type(path_or_glob).__name__}; "
            "other sources need not be opened: feedline.Feed(source, ...)"
        )
    name: str = os.fsdecode(path_or_glob)
    listed = matches(name, store or Store()) if is_url(name) else None
    if listed is not None:
        paths = [str(each.url) for each in listed]
    else:
        paths = [str(Url.parse(name))] if is_url(name) else local_matches(name)
    form = _format_of(paths, listed is not None or paths != [name], store)
    for option in sorted(options.given() - form.takes - {"store"}):
        takers = [suffix for suffix, other in formats().items() if option in other.takes]
        raise ValueError(f"{option} is for {', '.join(takers)}, got it with {paths[0]}; leave it out")
    if form is _FILES:
        return open_files(listed or paths, store)
    if form is _FOLDER:
        return _open_folder(paths[0], options)
    if form is _SAVED:
        return open_dataset(paths[0], options)
    return _open(form, paths, options)


def _format_of(paths: list[str], is_glob: bool, store: Store | None) -> Format:
    """The format of files that are read as one source, or of one folder.

    Args:
      is_glob: whether a glob found the files. If so, files whose suffix names no format are one row each.
    """
    first, suffixes = Path(paths[0]), sorted({_suffix(path) for path in paths})
    known = [suffix for suffix in suffixes if suffix in formats()]
    for path in map(Path, paths):
        if path.suffix == ".tgz" or (path.suffix in _COMPRESSED and _suffix(path.stem) in formats()):
            raise ValueError(
                f"rows are read in any order, so a file of rows must not be compressed as a whole, got {path}; "
                "decompress it: gunzip, unzstd, bunzip2 or unxz"
            )
    if len(suffixes) > 1 and known:
        raise ValueError(f"files whose rows follow each other must be of one format, got {', '.join(suffixes)}")
    if known:
        return formats()[known[0]]
    if is_glob:
        return _FILES
    if first.is_dir() or (is_url(paths[0]) and (paths[0].endswith("/") or not suffixes[0])):
        if not is_url(paths[0]):
            return _SAVED if is_saved(paths[0]) else _FOLDER
        return formats()[".zarr"] if zarr.is_zarr(paths[0], store) else _FOLDER
    if not (first.suffix or first.exists()):
        raise FileNotFoundError(f"there is no file or folder {paths[0]}; check the path")
    change = _TEXT.get(Path(first.stem).suffix if first.suffix in _COMPRESSED else first.suffix) or (
        "rename or convert it, give a folder or a glob of files that are one row each, or write a RowSource (the "
        "address of a folder in a store ends in /)"
    )
    raise ValueError(f"files of rows end in {', '.join(formats())}, got {paths[0]}; {change}")


def _suffix(path: str) -> str:
    """The suffix that names the format of a path. It is `.zarr` for a local Zarr folder of any name."""
    return ".zarr" if os.path.isdir(path) and zarr.is_zarr(path) else suffix_of(path)


def _open(form: Format, paths: list[str], options: OpenOptions) -> Source | EncodedSource:
    if form.name == "megatron":
        if options.window is None:
            raise ValueError(
                f"documents differ in length: pass window=..., for windows over all tokens of {paths[0]}, or use "
                "feedline.Ragged({'tokens': path}, pad_to=...), whose rows are documents"
            )
        return open_tokens(paths, options).values
    if form.name == "arrow":
        check_no_cache(paths)
    files = form.files(paths, options.store)
    if form.way == "mapped":
        return ArraySource(paths, options, files=files)
    if form.tail_bytes and files.in_store:  # fetch the ends of all objects at once
        files.samples([[(max(0, file.size - form.tail_bytes), form.tail_bytes)] for file in files])
    open_file = form.open
    if form.open_first is not None:
        first = next((number for number, file in enumerate(files) if file.size), 0)
        open_file = files.opened(first, functools.partial(form.open_first, options=options))
    assert open_file is not None
    return open_groups(open_file, files, options)


def _open_folder(path: str, options: OpenOptions) -> EncodedSource:
    source = open_folder(path, options.store)
    for name in source.file_of(0), source.file_of(len(source) - 1):
        if _suffix(name) in formats().keys() - {".npy", ".npz", ".bin"}:  # these may be one row each
            pattern = f"{path.rstrip('/')}/*{Path(name).suffix}"
            raise ValueError(
                f"a folder is opened for files that are one row each, but {name} holds many rows; open such files "
                f"by a path or a glob: open_source({pattern!r})"
            )
    return source
