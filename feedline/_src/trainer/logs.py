"""Callbacks for `fit` that write each report to a file: `CSVLog`, and `TensorBoardLog` for TensorBoard.

A log opens its file at the first report, and `fit` calls callbacks only on process 0, so only process 0 makes a
file. Each report is one unbuffered write. So a process that is killed leaves complete records, and no log needs a
thread.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from feedline._src.listen.statistics import HasStatistics, Statistics, check_feed, scalars
from feedline._src.trainer.loop import Progress

Values = Mapping[str, float | None]
"""The values of a report by name. None: not known yet."""
_RATES = ("rows_per_s", "wait_share")
_SAMPLING_INTERVAL_S = 1.0
"""Seconds from one sample of a feed's statistics to the next; a sample takes a third of a millisecond."""


class _Log:
    """Appends a record to a file at each report."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).resolve()
        self._file: io.FileIO | None = None
        self._step = 0  # of the last report

    def __call__(self, progress: Progress) -> None:
        values: dict[str, float | None] = {**progress.metrics, "rows_per_s": None, "wait_share": None}
        if progress.elapsed_rows:  # there is no rate right after the first step, which compiles
            values["rows_per_s"] = round(progress.rows_per_s, 1)
            values["wait_share"] = round(progress.wait_share, 4)
        self._write(progress.step, values, done=progress.resumed)

    def _write(self, step: int, values: Values, done: int) -> None:
        """Write the values of a step. `done`: how many steps earlier runs had done."""
        try:
            if self._file is None or step <= self._step:
                # a later step continues the run even after `close` or an error: keep the run's records
                self._begin(values, done if step <= self._step else max(done, self._step))
            self._append(self._record(step, values))
        except OSError as error:
            message = f"the log {self._path} cannot be written: {error.strerror or error}"
            raise OSError(error.errno, message, error.filename) from error
        self._step = step

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, values: Values, done: int) -> None:
        """Open the file for a run that continues after `done` steps. Drop or hide records of later steps."""
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


class CSVLog(_Log):
    """A callback for `fit` that writes a CSV file: one line for each report. Use it as a context manager.

    The columns are "step", the metrics, "rows_per_s" and "wait_share". If a later report has a new name, such as
    "eval_loss", a last column is added. It is empty in earlier lines, so `pandas.read_csv` gives a table with one
    row for each step. To add a column, the file is written anew and replaced atomically.

    A resumed run continues the file, and removes the lines of steps after the step from which it resumed. A run
    that begins at step 1 replaces the file.

    Args:
      path: the file. Its folder is made if there is none.

    Raises:
      TypeError: `path` is not a path.
      ValueError: the file exists and is not a log (raised at the first report).
      OSError: the file cannot be written (raised at a report). The error names the file. Earlier lines stay.

    Example:
      >>> import tempfile
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

    _columns: tuple[str, ...] = ()

    def _begin(self, values: Values, last: int) -> None:
        """Replace the file with one that has columns for all values, and no line of a step after `last`."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        header, lines = self._read()
        header = header if last else ["step"]  # a run that begins at step 1 has its own columns
        self._columns = (*header, *(name for name in values if name not in header))
        added = [""] * (len(self._columns) - len(header))
        # drop what a crash may leave: lines with another number of cells, or without a step
        whole = (line for line in lines if len(line) == len(header) and line[0].isdecimal())
        kept = [line + added for line in whole if int(line[0]) <= last]
        written = self._path.with_name(f".{self._path.name}.tmp")
        try:
            with written.open("wb") as file:
                file.writelines(map(_line, [[*self._columns], *kept]))
                file.flush()
                os.fsync(file.fileno())
            written.replace(self._path)
        finally:
            written.unlink(missing_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """The columns and the lines of the file; only "step" if there is no file. ValueError: it is not a log."""
        if not self._path.exists():
            return ["step"], []
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                text = file.read()
            with contextlib.suppress(csv.Error):
                header, *lines = [*csv.reader(io.StringIO(text, newline=""))] or [["step", *_RATES]]
                if header[:1] == ["step"] and {*_RATES} <= {*header}:
                    return header, lines if text.endswith("\n") else lines[:-1]
        raise ValueError(
            f"{self._path} is not a log: a log is a file with the columns step, "
            f"{', '.join(_RATES)}; give another path"
        )

    def _record(self, step: int, values: Values) -> bytes:
        if not values.keys() <= {*self._columns}:
            self._begin(values, self._step)
        cells = {"step": step, **values}
        return _line([cells.get(name) for name in self._columns])


def _line(cells: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


class TensorBoardLog(_Log):
    """A callback for `fit` that writes events for TensorBoard. Use it as a context manager.

    Each metric is a scalar with the same name as in the history; "rows_per_s" and "wait_share" are two more
    scalars. Each run writes a new file into the folder. If a run resumes from step s, TensorBoard hides
    the events of steps after s in earlier files; if a run begins at step 1, TensorBoard hides all earlier events.
    To compare trainings, give each its own folder. From your own loop, call `write`.

    It needs tensorboardX, but neither TensorFlow nor torch: `pip install '.[tensorboard]'` in the clone.

    Args:
      folder: the folder. It is made if there is none.
      feed: a feed whose metrics are written, too, at most once a second: accelerator utilisation, rates, times of
        stages. Their names begin with "feedline/"; docs/waiting.md lists them.

    Raises:
      TypeError: `folder` is not a path, or `feed` has no statistics.
      ImportError: tensorboardX is not installed.
      OSError: the file cannot be written (raised at a report). The error names the folder.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> with TensorBoardLog(folder) as log:
      ...     log(Progress(1, {"loss": 2.5}, 0, rows=64, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0))
      >>> [".tfevents." in path.name for path in folder.iterdir()]
      [True]
    """

    def __init__(self, folder: Path | str, feed: HasStatistics | None = None) -> None:
        super().__init__(folder)
        if feed is not None:
            check_feed(feed)
        self._feed = feed
        self._before: Statistics | None = None  # the statistics that were written last, and when
        self._before_s = -math.inf
        # not tensorboardX's SummaryWriter: it writes in a thread that ends at the first error, such as a full
        # disk; then the training loop hangs as soon as ten more events wait for the thread
        try:
            from tensorboardX import proto, record_writer
        except ImportError as error:
            raise ImportError("TensorBoardLog needs tensorboardX: pip install '.[tensorboard]'") from error
        self._proto: Any = proto
        self._checksum: Any = record_writer.masked_crc32c

    def write(self, step: int, values: Values) -> None:
        """Write values of a step, from your own loop.

        The first call begins a run at its `step`. TensorBoard hides events of earlier files from this step on.

        Args:
          step: larger than in the last call; otherwise a new run begins.
          values: scalars by name. If one is still on a device, the call waits for it.

        Raises:
          OSError: the file cannot be written.

        Example:
          >>> import tempfile
          >>> with TensorBoardLog(tempfile.mkdtemp()) as log:
          ...     for step in (10, 20, 30):
          ...         log.write(step, {"loss": 1 / step})
        """
        self._write(
            step, {name: None if value is None else float(value) for name, value in values.items()}, step - 1
        )

    def _begin(self, values: Values, done: int) -> None:
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._path / name).open("xb", buffering=0)
        start = self._proto.event_pb2.SessionLog(status=self._proto.event_pb2.SessionLog.START)
        # the lowest version whose SessionLog.START TensorBoard obeys
        begin = self._framed(file_version="brain.Event:2") + self._framed(step=done + 1, session_log=start)
        try:
            self._append(begin)
        except BaseException:
            self.close()  # so that the next report tries again, with a new file
            raise

    def _record(self, step: int, values: Values) -> bytes:
        now_s = time.monotonic()
        if self._feed is not None and now_s - self._before_s >= _SAMPLING_INTERVAL_S:
            now = self._feed.statistics()
            values = {**values, **scalars(now, self._before, now_s - self._before_s)}
            self._before, self._before_s = now, now_s
        of = self._proto.summary_pb2.Summary
        known = [of.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None]
        return self._framed(step=step, summary=of(value=known))

    def _framed(self, **fields: Any) -> bytes:
        """An event in the TFRecord format: length, checksum, bytes, checksum."""
        event: bytes = self._proto.event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
        parts = (struct.pack("<Q", len(event)), event)
        return b"".join(part + struct.pack("<I", self._checksum(part)) for part in parts)
