"""Callbacks for `fit` that write each report to a file: what they have in common, and `CSVLog`.

A file is opened at the first report, so only process 0, whose callbacks are called, makes one. Each report is one
unbuffered write. So a process that is killed leaves whole records, and no log needs a thread.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from feedline._src.trainer.loop import Progress

Values = Mapping[str, float | None]
"""The values of a report by name. None: not known yet."""
_RATES = ("rows_per_s", "wait_share")


class Log:
    """Appends a record to a file at each report."""

    def __init__(self, path: Path | str, argument: str) -> None:
        if not isinstance(path, str | Path) or not str(path):
            raise TypeError(f"{argument} must be a path, as a str or a Path, got {path!r}")
        self._path = Path(path).resolve()
        self._file: io.FileIO | None = None
        self._step = 0  # of the last report

    def __call__(self, progress: Progress) -> None:
        self._write(progress.step, _values(progress), done=progress.resumed)

    def _write(self, step: int, values: Values, done: int) -> None:
        """Write the values of a step of a run that continues after `done` steps."""
        with self._naming_path():
            begins = self._file is None or step <= self._step
            self._step = step
            if begins:
                self._begin(values, done)
            self._append(self._record(step, values))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with self._naming_path():
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, values: Values, done: int) -> None:
        """Open the file for a run that continues after `done` steps; forget the steps after these."""
        raise NotImplementedError

    def _record(self, step: int, values: Values) -> bytes:
        raise NotImplementedError

    def _append(self, record: bytes) -> None:
        """Write all of a record or, if that fails, none of it."""
        assert self._file is not None
        end = self._file.seek(0, os.SEEK_END)
        left = memoryview(record)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    @contextlib.contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            told = f"the log {self._path} cannot be written: {error.strerror or error}"
            raise OSError(error.errno, told, error.filename) from error


class CSVLog(Log):
    """A callback for `fit` that writes a CSV file: one line for each report. Use it as a context manager.

    The columns are "step", the metrics, "rows_per_s" and "wait_share". A name that appears at a later report, such
    as that of an evaluation, becomes the last column, and the cells above it are empty: `pandas.read_csv` gives a
    table with one row for each step. For that the file is written anew and replaced atomically.

    A resumed run continues the file: the lines of the steps after the one that it resumed from are removed. A run
    that begins at its first step replaces the file.

    Args:
      path: the file. Its folder is made if there is none.

    Raises:
      TypeError: `path` is not a path.
      ValueError: at the first report: the file exists and is not a log, or a metric is called "step",
        "rows_per_s" or "wait_share".
      OSError: at a report: the file cannot be written. The error names it, and the lines before stay whole.

    Example:
      >>> import tempfile
      >>> from feedline._src.trainer.loop import Progress
      >>> path = Path(tempfile.mkdtemp()) / "log.csv"
      >>> with CSVLog(path) as log:
      ...     log(Progress(1, {"loss": 2.5}, 0, rows=64, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0))
      ...     metrics = {"loss": 1.5, "eval_loss": 1.25}
      ...     log(Progress(10, metrics, 0, rows=640, elapsed_s=0.5, elapsed_rows=576, wait_s=0.125))
      >>> print(path.read_text(), end="")
      step,loss,rows_per_s,wait_share,eval_loss
      1,2.5,,,
      10,1.5,1152.0,0.25,1.25
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, "path")
        self._columns: list[str] = []

    def _begin(self, values: Values, done: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not self._path.is_file():
            raise ValueError(f"{self._path} is no regular file, so it cannot hold a log; give another path")
        self._write_anew(values, done)

    def _record(self, step: int, values: Values) -> bytes:
        if not values.keys() <= set(self._columns):
            self._write_anew(values, self._step)
        cells = {"step": step, **values}
        return _line([cells.get(name) for name in self._columns]).encode()

    def _write_anew(self, values: Values, last: int) -> None:
        """Replace the file by one that has columns for all values, and no line of a step after `last`."""
        self.close()
        written = self._path.with_name(f".{self._path.name}.tmp")
        try:
            with contextlib.closing(self._lines()) as lines, written.open("wb") as file:
                header = next(lines, ["step"])
                if header != ["step"] and (header[:1] != ["step"] or not {*_RATES} <= {*header}):
                    raise ValueError(
                        f"{self._path} is not a log, since it lacks columns step, {', '.join(_RATES)}; "
                        "give another path"
                    )
                self._columns = [*header, *(name for name in values if name not in header)]
                file.write(_line(self._columns).encode())
                for line in lines:
                    # a line that a full disk or a crash cut off has too few cells, or no step
                    if len(line) == len(header) and line[0].isdecimal() and int(line[0]) <= last:
                        file.write(_line(line + [""] * (len(self._columns) - len(line))).encode())
                file.flush()
                os.fsync(file.fileno())
            written.replace(self._path)
        finally:
            written.unlink(missing_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def _lines(self) -> Generator[list[str], None, None]:
        """The cells of each line of the file, the header first; nothing if there is no file."""
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                yield from csv.reader(file)


def _values(progress: Progress) -> Values:
    rates: list[float | None] = [None, None]
    if progress.elapsed_rows:  # there is no rate after the first step, which compiles
        rates = [round(progress.rows_per_s, 1), round(progress.wait_share, 4)]
    hidden = {"step", *_RATES} & progress.metrics.keys()
    if hidden:
        raise ValueError(
            f'a log has a "{min(hidden)}" of its own, so no metric can have that name; rename the metric'
        )
    return {**progress.metrics, **dict(zip(_RATES, rates, strict=True))}


def _line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
