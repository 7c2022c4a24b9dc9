"""What a terminal shows: the text of --help, names from outside, and what a command is doing."""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

_ATTRIBUTES = re.compile(r"^\s*Attributes:$", re.MULTILINE)


def help_text(command: type, *, alone: bool) -> str:
    """A command's docstring without its attributes, which tyro lists as options.

    tyro does not wrap paragraphs, and would show all of them in the list of subcommands. It joins lines that begin
    with a letter, so the paragraphs after the first are formatted as a list.

    Args:
      alone: True: the whole text, for `feedline COMMAND --help`; False: its first sentence, for the list.

    Example:
      >>> class Command:
      ...     '''Do it.
      ...
      ...     In many ways.
      ...     '''
      >>> help_text(Command, alone=False)
      'Do it.'
    """
    text = _ATTRIBUTES.split(inspect.getdoc(command) or "")[0].strip()
    paragraphs = text.split("\n\n")
    if not alone:
        return " ".join(paragraphs[0].split())
    width = shutil.get_terminal_size().columns
    lines = [textwrap.fill(paragraphs[0], width, subsequent_indent="  ")]
    for part in paragraphs[1:]:
        example = part.startswith(" ")
        lines.append(part if example else textwrap.fill(part, width, initial_indent="- ", subsequent_indent="  "))
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text with escape sequences and other control characters written out: a terminal would obey them.

    Example:
      >>> print(printable("größe\\x1b[31m.npy"))
      größe\\x1b[31m.npy
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


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
