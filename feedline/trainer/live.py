"""Shows the loop's progress: one line that is updated on a terminal, or a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from feedline.trainer.loop import Progress

_UPDATE_EVERY_S = 0.1  # on a terminal
_PRINT_EVERY_S = 10.0  # elsewhere


class _Console(Console):
    """Standard error. If it is a pipe whose reader has closed, the program continues without output."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Overrides rich, which raises SystemExit."""
        self.quiet = True


class LiveLine:
    """A callback for `fit` that writes to standard error. Use it as a context manager.

    It starts no thread: the line is updated when the loop reports.

    Args:
      steps: the number of steps in all, or a function that gives it, called at the first report. None: not known.
      console: where to write. None: standard error.

    Example:
      >>> with LiveLine(steps=2, console=Console(force_terminal=False)) as live:
      ...     live(Progress(1, {"loss": 2.3}, resumed=0, rows=128, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0))
      step 1 of 2 | loss 2.3000
    """

    def __init__(self, steps: int | Callable[[], int] | None = None, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or _Console()
        self._line = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_at_s = 0.0

    def __enter__(self) -> LiveLine:
        if self._console.is_terminal:
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.stop()

    def __call__(self, progress: Progress) -> None:
        if callable(self._steps):
            self._steps = self._steps()
        if time.monotonic() < self._next_at_s:
            return
        text = progress_line(progress, self._steps)
        if self._console.is_terminal:
            self._line.update(Text(text, no_wrap=True), refresh=True)
        else:
            self._console.print(text, highlight=False, soft_wrap=True)
        self._next_at_s = time.monotonic() + (_UPDATE_EVERY_S if self._console.is_terminal else _PRINT_EVERY_S)


def progress_line(progress: Progress, steps: int | None) -> str:
    """One line: step, metrics and, after two steps, rows/s and the share of time waiting for input."""
    of_all = "" if steps is None else f" of {steps:,}"
    parts = [f"step {progress.step:,}{of_all}"]
    parts += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in progress.metrics.items()]
    if progress.elapsed_s:
        parts += [f"{progress.rows_per_s:,.0f} rows/s", f"waiting for input {progress.wait_share:.1%}"]
    return " | ".join(parts)
