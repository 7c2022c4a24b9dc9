"""`TensorBoardLog`: writes the reports of `fit`, or of a loop of your own, as events for TensorBoard."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from feedline._src.observe.metrics import HasStatistics, check_feed, scalars
from feedline._src.statistics import Statistics
from feedline._src.trainer.logs import Log, Values

_FEED_EVERY_S = 1.0
"""A feed's statistics take a third of a millisecond."""


class TensorBoardLog(Log):
    """A callback for `fit` that writes events for TensorBoard. Use it as a context manager.

    Each metric is a scalar with the same name as in the history; "rows_per_s" and "wait_share" are two more. Each
    run writes a new file into the folder. A resumed run makes TensorBoard hide the events of earlier files after
    the step that it resumed from; a run that begins at its first step hides all of them. To compare trainings,
    give each a folder. A loop of your own calls `write` instead.

    It needs tensorboardX, but neither TensorFlow nor torch: `pip install '.[tensorboard]'` in the clone.

    Args:
      folder: the folder. It is made if there is none.
      feed: whose metrics are written, too, at most once a second: accelerator utilisation, rates, times of the
        stages. Their names begin with "feedline/"; docs/metrics.md lists them.

    Raises:
      TypeError: `folder` is not a path, or `feed` has no statistics.
      ImportError: tensorboardX is not installed.
      ValueError: at a report: a metric is called "step", "rows_per_s" or "wait_share".
      OSError: at a report: the file cannot be written. The error names the folder.

    Example:
      >>> import tempfile
      >>> from feedline._src.trainer.loop import Progress
      >>> folder = Path(tempfile.mkdtemp())
      >>> with TensorBoardLog(folder) as log:
      ...     log(Progress(1, {"loss": 2.5}, 0, rows=64, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0))
      >>> [".tfevents." in path.name for path in folder.iterdir()]
      [True]
    """

    def __init__(self, folder: Path | str, feed: HasStatistics | None = None) -> None:
        super().__init__(folder, "folder")
        if feed is not None:
            check_feed(feed)
        self._feed = feed
        self._before: Statistics | None = None  # as they were written last, and when
        self._before_s = -math.inf
        # not its SummaryWriter: that writes in a thread, which ends at the first error, such as a full disk; then
        # the training loop hangs as soon as ten more events wait for the thread
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ModuleNotFoundError as error:
            if error.name != "tensorboardX":
                raise
            raise ImportError(
                "TensorBoardLog needs tensorboardX, which is not installed; from the clone: "
                "pip install '.[tensorboard]'"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._checksum: Any = masked_crc32c

    def _begin(self, values: Values, done: int) -> None:
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._path / name).open("xb", buffering=0)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._append(
            self._framed(file_version="brain.Event:2")  # TensorBoard heeds SessionLog.START from this version on
            + self._framed(step=done + 1, session_log=start)
        )

    def write(self, step: int, values: Values) -> None:
        """Write values of a step, from a loop of your own.

        The first step that is written begins the run: TensorBoard hides what earlier files hold from there on.

        Args:
          step: more than the last one; else a new run begins.
          values: scalars by name. One that is still on a device is waited for.

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

    def _record(self, step: int, values: Values) -> bytes:
        of = self._summaries.Summary
        values = {**values, **self._feed_scalars()}
        known = [of.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None]
        return self._framed(step=step, summary=of(value=known))

    def _feed_scalars(self) -> dict[str, float]:
        now_s = time.monotonic()
        if self._feed is None or now_s - self._before_s < _FEED_EVERY_S:
            return {}
        now = self._feed.statistics()
        found = scalars(now, self._before, now_s - self._before_s)
        self._before, self._before_s = now, now_s
        return found

    def _framed(self, **fields: Any) -> bytes:
        """An event as the TFRecord format has it: length, checksum, bytes, checksum."""
        event: bytes = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        parts = (struct.pack("<Q", len(event)), event)
        return b"".join(part + struct.pack("<I", self._checksum(part)) for part in parts)
