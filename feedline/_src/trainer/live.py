"""Shows the loop's progress: on a terminal one line that is updated, elsewhere a new line every ten seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from feedline._src.listen.report import report_of
from feedline._src.listen.statistics import HasStatistics, check_feed
from feedline._src.trainer.loop import Progress

_UPDATE_EVERY_S = 0.1  # on a terminal
_PRINT_EVERY_S = 10.0  # to a file or a pipe


class _Console(Console):
    """Standard error. If it is a pipe whose reader has closed, the program continues without output."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would raise SystemExit


class LiveLine(contextlib.AbstractContextManager["LiveLine"]):
    """A callback for `fit` that writes to standard error. Use it as a context manager.

    The line shows the step, the loss, rows/s since the first step, and the share of the time in which the loop
    waits for input. With a feed, this share covers the latest batches, and two parts follow: what limits training
    (such as "limit: read", see `Feed.report`), and the bytes/s that this process places. Other metrics come last.
    On a terminal, the last parts are left out if the line is too long.

    No thread is started: the line is updated when the loop reports, at most ten times a second. With a feed, each
    update takes up to two milliseconds.

    Args:
      steps: the total number of steps. None: unknown.
      console: where to write. None: standard error.
      feed: the feed that the loop takes batches from.

    Raises:
      TypeError: `feed` has no statistics.

    Example:
      >>> with LiveLine(steps=2, console=Console(force_terminal=False)) as live:
      ...     live(Progress(1, {"loss": 2.3}, resumed=0, rows=128, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0))
      step 1 of 2 | loss 2.3000
    """

    def __init__(
        self, steps: int | None = None, console: Console | None = None, feed: HasStatistics | None = None
    ) -> None:
        if feed is not None:
            check_feed(feed)
        self._steps = steps
        self._console = console or _Console()
        self._feed = feed
        self._line = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_at_s = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.stop()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self._next_at_s:
            return
        parts = [*self._parts(progress)]
        if terminal := self._console.is_terminal:
            while len(parts) > 1 and cell_len(" | ".join(parts)) > self._console.width:
                parts.pop()
            self._line.start()
            self._line.update(Text(" | ".join(parts), no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._console.print(Text(" | ".join(parts)), soft_wrap=True)
        self._next_at_s = time.monotonic() + (_UPDATE_EVERY_S if terminal else _PRINT_EVERY_S)

    def _parts(self, progress: Progress) -> Iterator[str]:
        """The parts of the line, the most important first. Parts with times appear only after two steps."""
        yield f"step {progress.step:,}" + ("" if self._steps is None else f" of {self._steps:,}")
        metrics = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in progress.metrics.items()]
        yield from metrics[:1]  # the loss
        if progress.elapsed_s:
            yield f"{progress.rows_per_s:,.0f} rows/s"
            now = None if self._feed is None else self._feed.statistics()
            wait_share = progress.wait_share if now is None or now.wait_share is None else now.wait_share
            yield f"wait {wait_share:.0%}"
            if (found := report_of(self._feed)) is not None:
                yield f"limit: {'busy machine' if found.bound == 'machine' else found.bound}"
            if now is not None and now.rows:
                rate = progress.rows_per_s * now.placed_bytes / now.rows
                yield f"{rate / 1e9:.3g} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"
        yield from metrics[1:]
