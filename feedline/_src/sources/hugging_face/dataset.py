"""A dataset of the library `datasets`: its recognition, and the Arrow table, row indices and files behind it."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np

from feedline._src.files.version import FileVersion
from feedline._src.formats.open_options import OpenOptions
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices

_CHECKS_A_READ = 4  # files, at some 5 µs each
_SAMPLED_ROWS = 64


class HuggingFaceDataset(Protocol):
    """What feedline uses of a `datasets.Dataset`, besides the length and the private `_indices`.

    Attributes:
      data: a table of the library, which wraps the Arrow table of all rows and columns.
      format: what `set_format` and `with_transform` have set.
      column_names: of all columns.
      cache_files: the files into which the table and the row indices are mapped.
    """

    data: Any
    format: Mapping[str, Any]
    column_names: list[str]
    cache_files: list[dict[str, str]]


def is_dataset(value: Any) -> TypeGuard[HuggingFaceDataset]:
    """Whether it is a `datasets.Dataset`.

    Raises:
      TypeError: it is a stream of the same library, or a dict of datasets by split.
    """
    if _is(value, "dataset_dict", "DatasetDict") or _is(value, "dataset_dict", "IterableDatasetDict"):
        names = ", ".join(repr(name) for name in value)
        raise TypeError(
            f"a source is the dataset of one split, got a {type(value).__name__} with the splits {names}; pass "
            f"one of them, dataset[{next(iter(value), 'train')!r}], or load_dataset(..., split=...)"
        )
    if _is(value, "iterable_dataset", "IterableDataset"):
        raise TypeError(
            "rows of a source have random access, and those of an IterableDataset only come one after the other; "
            "load the dataset without streaming=True, or pass it as a stream: docs/hugging_face.md#streaming "
            "has the class"
        )
    return _is(value, "arrow_dataset", "Dataset")


def _is(value: Any, module: str, name: str) -> bool:
    """Whether it is an object of this class of `datasets`, which can only be so if that library was imported."""
    found = sys.modules.get(f"datasets.{module}")
    return found is not None and isinstance(value, getattr(found, name))


class OpenDataset:
    """The chosen columns of a dataset, and where its rows lie in them. Pickles as the dataset does: by its files.

    Args:
      dataset: of one split.
      options: columns.
      versions: the expected versions of its files by path; by default, the present ones.

    Attributes:
      table: a `pyarrow.Table` of the chosen columns.
      rows: for each row of the dataset its row in the table; None: the same.
      versions: of the files into which the table is mapped; empty for a dataset in memory.

    Raises:
      ValueError: no rows, no such column, or a format that changes values.
      FileNotFoundError: a file was deleted.
    """

    def __init__(
        self, dataset: HuggingFaceDataset, options: OpenOptions, versions: dict[str, FileVersion] | None = None
    ) -> None:
        _check_format(dataset.format)
        of_format = dataset.column_names if dataset.format["output_all_columns"] else dataset.format["columns"]
        if not of_format:
            raise ValueError("a source must have at least one column, and this dataset has none")
        names = options.chosen(of_format, "this dataset")
        self._dataset = dataset
        self._options = options
        self.versions = _versions(dataset) if versions is None else versions
        self._to_check = itertools.cycle(self.versions.items())
        self.table = dataset.data.table.select(names)
        try:
            self.table.validate()  # sizes of buffers: damaged files could end the process else
        except ValueError as error:
            files = f", in {', '.join(list(self.versions)[:3])}" if self.versions else ""
            raise ValueError(
                f"the table of this dataset is damaged{files}: {error}; make the dataset again"
            ) from error
        indices: Any = dataset._indices  # type: ignore[attr-defined]  # no public attribute has them
        self.rows: Indices | None = None
        if indices is not None:
            self.rows = np.asarray(indices.table.column(0).to_numpy(), np.uint64).view(np.int64)
        if len(self) == 0:
            raise ValueError("a source must have at least one row, and this dataset has none")

    def __len__(self) -> int:
        return self.table.num_rows if self.rows is None else len(self.rows)

    @property
    def sampled_rows(self) -> Indices:
        """The rows of which an identity is made."""
        return np.array(digests.sampled(len(self), _SAMPLED_ROWS), np.int64)

    def rows_in_table(self, rows: Indices) -> Indices:
        """int64[k]: where these rows of the dataset lie in the table. IndexError: there is no such row."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")
        return rows if self.rows is None else self.rows[rows]

    def check_files(self) -> None:
        """Refuse files that were written to. Each call checks only the next few of many files, to stay cheap.

        Raises:
          FeedError: one was written to or truncated.
        """
        for path, version in itertools.islice(self._to_check, min(_CHECKS_A_READ, len(self.versions))):
            version.check_open(path)

    def __reduce__(self) -> Any:
        return _opened_again, (pickle.dumps(self._dataset), self._options, self.versions)


def _opened_again(dataset: bytes, options: OpenOptions, versions: dict[str, FileVersion]) -> OpenDataset:
    """A copy of a dataset that another process has open. FeedError if a file has changed since."""
    for path, version in versions.items():
        version.check(path)
    return OpenDataset(pickle.loads(dataset), options, versions)


def _versions(dataset: HuggingFaceDataset) -> dict[str, FileVersion]:
    try:
        return {file["filename"]: FileVersion.of(file["filename"]) for file in dataset.cache_files}
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the files of a dataset must exist, and {error.filename} was deleted; load the dataset again"
        ) from None


def _check_format(found: Mapping[str, Any]) -> None:
    """Refuse what makes other values of those in the table. "numpy" and its like only convert them to arrays."""
    if found["type"] == "custom":
        raise ValueError(
            "open_source reads the values that are stored, and this dataset has a transform (with_transform or "
            "set_transform), which would not be called; pass the dataset itself to the feed, which then reads row "
            "by row and calls it, or remove it with dataset.with_format(None), and use feedline.decoded or "
            "Feed(transform=...)"
        )
    if found["format_kwargs"]:
        raise ValueError(
            "open_source reads the values that are stored, and the format of this dataset converts them, by "
            f"{dict(found['format_kwargs'])}; remove it with dataset.with_format(None), and convert in the step, "
            "or in the dataset with dataset.cast_column"
        )
