"""The formats of files that `open_source` opens, by their suffixes."""

from __future__ import annotations

import os
from pathlib import Path

from feedline._src.files.store import Store, is_url
from feedline._src.formats import zarr
from feedline._src.formats.hugging_face import STATE, check_no_cache, is_saved
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import MODULES, Format, format_of, suffix_of
from feedline._src.rows.encoded_source import EncodedRows
from feedline._src.rows.source import Source
from feedline._src.sources import folder
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.datasets import open_dataset
from feedline._src.sources.groups import open_groups
from feedline._src.sources.ragged import open_windows
from feedline._src.sources.record_files import open_records

FILES = Format("files", ())
"""Files whose suffix is that of no format: each is a row."""
_FOLDER = Format("folder", ())
_SAVED = Format("saved", (), takes=frozenset({"columns"}))


def open_files(form: Format, paths: list[str], options: OpenOptions) -> Source | EncodedRows:
    """The rows of files of this format, or of one folder."""
    if form is FILES:
        return folder.open_files(paths, options.store)
    if form is _FOLDER:
        return _open_folder(paths[0], options)
    if form is _SAVED:
        return open_dataset(paths[0], options)
    if form.name == "megatron":
        return open_windows(paths, options)
    if form.name == "arrow":
        check_no_cache(paths)
    files = form.files(paths, options.store)
    if form.way == "mapped":
        return ArraySource(paths, options, files=files)
    if form.way == "records":
        return open_records(form, files, options)
    assert form.open is not None
    if form.tail_bytes and files.in_store:
        files.samples([[(max(0, file.size - form.tail_bytes), form.tail_bytes)] for file in files])
    return open_groups(form.open, files, options)


def _open_folder(path: str, options: OpenOptions) -> EncodedRows:
    source = folder.open_folder(path, options.store)
    last = os.path.basename(source.file_of(len(source) - 1))
    for name in {source.file_of(0), source.file_of(len(source) - 1)}:
        if _suffix(name) in MODULES.keys() - {".npy", ".npz", ".bin"}:  # those may be a row each
            form = f"*{Path(name).suffix}"
            known = {STATE: f"data-{form}", "lock.mdb": "data.mdb"}  # Hugging Face, in a store; LMDB
            glob = f"{path.rstrip('/')}/{known.get(last, form)}"
            raise ValueError(
                f"a folder is opened for files that are a row each, and {name} holds many rows; open such files "
                f"by a path or a glob: open_source({glob!r})"
            )
    return source


_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_TABLE = "write a table as Parquet or Arrow once, pyarrow.{0}.read_{0} reads it (docs/tables.md)"
_TOKENS = "write text as .bin files of tokens once (docs/text.md#files-of-tokens)"
_TEXT = {
    ".json": f"{_TOKENS}, and {_TABLE.format('json')}, or write an object a line (.jsonl)",
    ".txt": f"{_TOKENS}, or give a folder or a glob of files that are a row each",
}
"""What to do with files of text, which have no rows that can be read in any order."""


def format_of_paths(paths: list[str], is_glob: bool, store: Store | None) -> Format:
    """The format of files whose rows follow each other.

    Args:
      paths: of the files, or of one folder.
      is_glob: whether they were found by a glob: then files with another suffix are a row each.
      store: how objects in stores are read.

    Raises:
      ValueError: files of several formats, of none, or compressed as a whole.
    """
    suffixes = sorted({_suffix(path) for path in paths})
    known = [suffix for suffix in suffixes if suffix in MODULES]
    packed = next((path for path in paths if _is_packed(path)), None)
    if packed is not None:
        raise ValueError(
            f"rows are read in any order, so a file of many must not be compressed as a whole, got {packed}; "
            "decompress it: gunzip, unzstd, bunzip2 or unxz"
        )
    if len(suffixes) > 1 and known:
        raise ValueError(f"files whose rows follow each other must be of one format, got {', '.join(suffixes)}")
    if known:
        return format_of(known[0])
    if is_glob:
        return FILES
    if Path(paths[0]).is_dir() or (is_url(paths[0]) and (paths[0].endswith("/") or not suffixes[0])):
        if not is_url(paths[0]) and is_saved(paths[0]):
            return _SAVED
        is_zarr = is_url(paths[0]) and zarr.is_zarr(paths[0], store)
        return format_of(".zarr") if is_zarr else _FOLDER
    if not (Path(paths[0]).suffix or Path(paths[0]).exists()):
        raise FileNotFoundError(f"there is no file or folder {paths[0]}; check the path")
    name = Path(paths[0])
    change = _TEXT.get(Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix) or (
        "rename or convert it, give a folder or a glob of files that are a row each, or write a RowSource (the "
        "address of a folder in a store ends in /)"
    )
    raise ValueError(f"files of rows end in {', '.join(MODULES)}, got {paths[0]}; {change}")


def _is_packed(path: str) -> bool:
    """Whether it is a file of many rows that was compressed as a whole."""
    name = Path(path)
    return name.suffix == ".tgz" or (name.suffix in _COMPRESSED and _suffix(name.stem) in MODULES)


def _suffix(path: str) -> str:
    """What names the format of a file or a folder."""
    return ".zarr" if os.path.isdir(path) and zarr.is_zarr(path) else suffix_of(path)
