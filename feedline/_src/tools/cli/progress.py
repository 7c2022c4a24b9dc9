"""What a command is doing, on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(command: str, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, and within the block whatever the yielded function is called with.

    On a terminal, it is one line that changes; in a file or a pipe, a line each, flushed.
    """
    from rich.console import Console

    def write(text: str) -> None:
        with contextlib.suppress(OSError):  # a closed pipe
            print(f"feedline {command}: {text}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:
        write(text)
        yield write
