"""Documents: rows of any length, stored as one array of values and the offsets at which documents begin."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.store import is_url
from feedline._src.formats.open_options import OpenOptions
from feedline._src.native.spans import Spans
from feedline._src.rows.source import Source, WillRead
from feedline._src.rows.values import is_list
from feedline._src.sources.arrays import ArraySource

Indices = npt.NDArray[np.int64]
_REPAIR = "np.concatenate([[0], np.cumsum(lengths)]) makes offsets"


class Documents(NamedTuple):
    """Document i is `values[offsets[i] : offsets[i + 1]]`.

    Attributes:
      values: a source of one leaf.
      offsets: int64[documents + 1], never decreasing, in memory. Values before offsets[0] are in no document.
    """

    values: ArraySource
    offsets: Indices

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one value."""
        (spec,) = jax.tree.leaves(self.values.spec)
        found: jax.ShapeDtypeStruct = spec
        return found

    @property
    def digest(self) -> str:
        """A digest of all offsets, for `Source.identity`."""
        return hashlib.sha256(self.offsets.data).hexdigest()[:32]

    def lengths(self, rows: Indices) -> Indices:
        """int64[k]: how many values each of these documents has."""
        found: Indices = self.offsets[rows + 1] - self.offsets[rows]
        return found

    def spans(self, rows: Indices) -> Spans:
        """The spans of these documents, without empty ones."""
        lengths = self.lengths(rows)
        filled = np.flatnonzero(lengths)
        return Spans(filled, self.offsets[rows[filled]], lengths[filled])


class DocumentSource(Source):
    """Base class of sources that read columns of documents, and perhaps plain arrays."""

    _arrays: list[ArraySource]
    """All arrays that are read."""

    @property
    def will_read(self) -> WillRead | None:
        """Fetches rows from a store ahead of their reads. None: each is local, or cached and mapped."""
        return self._will_read if any(source.will_read is not None for source in self._arrays) else None

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """Cancel what is being fetched. A mapped file is unmapped once no array refers to it any more."""
        for source in self._arrays:
            source.close()


def is_documents(given: Any) -> bool:
    """Whether to pass a value to `open_documents`. True for any tuple: `open_documents` refuses a wrong one."""
    return isinstance(given, tuple) or _is_arrow_lists(given) or bool(_index_paths(given))


def open_documents(name: str, given: Any) -> Documents:
    """Open a column of documents.

    Args:
      name: the name of the column, for errors.
      given: `(values, offsets)`, which are arrays or paths; or the path of an `.idx` file of Megatron-LM, a glob
        or a list of such paths; or a `pyarrow` column of lists, whose values are not copied.

    Raises:
      ValueError: values and offsets do not fit together, or a file is damaged.
      TypeError: a value has the wrong type.
      FileNotFoundError: there is no such file.
    """
    if paths := _index_paths(given):
        from feedline._src.files.folder import local_matches

        files = [match for path in paths for match in ([path] if is_url(path) else local_matches(path))]
        return open_tokens(files, OpenOptions())
    if _is_arrow_lists(given):
        return _of_arrow(name, given)
    count = len(jax.tree.leaves(given, is_leaf=is_list))
    if not isinstance(given, tuple) or len(given) != 2 or count != 2:
        found = f"a tuple with {count} arrays" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise TypeError(
            "a column of documents is a tuple (values, offsets), the path of an .idx of Megatron-LM, or a pyarrow "
            f"column of lists, got {found} for {name!r}; np.concatenate(documents) makes values, {_REPAIR}"
        )
    values, offsets = ArraySource([{name: given[0]}]), _offsets_in_memory(name, given[1])
    lengths = np.diff(offsets)
    if (lengths < 0).any() or offsets[0] < 0 or offsets[-1] > len(values):
        at = int(lengths.argmin())
        found = f"{offsets[at]} to {offsets[at + 1]} at row {at}" if lengths[at] < 0 else f"{offsets[[0, -1]]}"
        raise ValueError(
            f"offsets must not decrease, be at least 0 and at most the number of values, {len(values)}, got "
            f"{found} for {name!r}; check whether values or offsets are truncated. If not, {_REPAIR}"
        )
    return Documents(values, offsets)


def open_tokens(paths: Sequence[str], options: OpenOptions) -> Documents:
    """Open `.idx` files of Megatron-LM as one sequence of documents. The `.bin` beside each file has its tokens.

    Raises:
      ValueError: files are damaged, or do not fit together.
    """
    from feedline._src.files.files import Files
    from feedline._src.formats import megatron

    files = Files(paths, options.store)
    indices = [files.opened(number, megatron.read_index) for number in range(len(files))]
    dtypes = {str(index.dtype) for index in indices}
    if len(dtypes) > 1:
        raise ValueError(f"files that are read as one source must have tokens of one dtype, got {sorted(dtypes)}")
    tokens = Files([megatron.tokens_beside(path) for path in paths], options.store)
    for index, file in zip(indices, tokens, strict=True):
        megatron.check_tokens(index, file.name, file.size)
    values = ArraySource(tokens.paths, dataclasses.replace(options, dtype=indices[0].dtype), files=tokens)
    lengths = np.concatenate([np.diff(index.offsets) for index in indices])
    return Documents(values, _offsets_of(lengths))


def _index_paths(given: Any) -> list[str]:
    """The paths, if `given` is the path of an `.idx` file or a list of such paths; else an empty list."""
    paths = given if isinstance(given, list) else [given]
    are_paths = all(isinstance(path, str | os.PathLike) and os.fspath(path).endswith(".idx") for path in paths)
    return [os.fspath(path) for path in paths] if are_paths else []


def _is_arrow_lists(given: Any) -> bool:
    return hasattr(given, "flatten") and hasattr(getattr(given, "type", None), "value_type")


def _of_arrow(name: str, column: Any) -> Documents:
    chunks = [chunk for chunk in getattr(column, "chunks", [column]) if len(chunk)]
    if not chunks:
        raise ValueError(f"a column must have at least one list, and {name!r} has none; check it")
    try:
        parts = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
    except ValueError as error:  # raised by pyarrow
        raise ValueError(
            f"the lists of {name!r} must hold numbers without nulls, got {column.type}: {error}; cast them, or "
            "fill the nulls"
        ) from error
    lengths = [np.asarray(chunk.value_lengths().fill_null(0)) for chunk in chunks]
    return Documents(ArraySource([{name: part} for part in parts]), _offsets_of(np.concatenate(lengths)))


def _offsets_of(lengths: Indices) -> Indices:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _offsets_in_memory(name: str, given: Any) -> Indices:
    source = ArraySource([{name: {"offsets": given}}])
    (spec,) = jax.tree.leaves(source.spec)
    if spec.dtype.kind not in "iu" or spec.shape or len(source) < 2:
        raise TypeError(
            "offsets must be integers in one axis, one for each document and one for the end, at least 2, got "
            f"{spec.dtype}{[len(source), *spec.shape]} for {name!r}; {_REPAIR}"
        )
    found = np.empty(len(source), spec.dtype)
    source.read(np.arange(len(source)), [found])
    source.close()
    return found.astype(np.int64, copy=False)
