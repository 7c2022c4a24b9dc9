"""Text for a terminal: --help, escaped text, numbers of bytes, and the progress of a command."""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping


def help_text(command: type) -> str:
    """A command's docstring, wrapped for the terminal, without the attributes, which tyro lists as options.

    tyro does not wrap paragraphs, and joins a line that begins with a letter to the line before it. So each
    paragraph after the first begins with "- ".
    """
    text = re.split(r"^\s*Attributes:$", inspect.getdoc(command) or "", flags=re.MULTILINE)[0].strip()
    width = shutil.get_terminal_size().columns
    first, *others = text.split("\n\n")
    lines = [textwrap.fill(first, width, subsequent_indent="  ")]
    for part in others:
        example = part.startswith(" ")
        lines.append(part if example else textwrap.fill(part, width, initial_indent="- ", subsequent_indent="  "))
    return "\n".join(lines)


def listed(commands: Mapping[str, type]) -> str:
    """Each command with the first paragraph of its docstring, wrapped for the terminal."""
    width, indent = shutil.get_terminal_size().columns, max(map(len, commands)) + 4
    return "\n".join(
        textwrap.fill(
            " ".join((inspect.getdoc(command) or "").split("\n\n")[0].split()),
            width,
            initial_indent=f"  {name}".ljust(indent),
            subsequent_indent=" " * indent,
        )
        for name, command in commands.items()
    )


def printable(text: str) -> str:
    """The text with control characters escaped, so that a terminal does not obey escape sequences in it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def in_bytes(count: float) -> str:
    """A number of bytes with a binary unit, to four digits, such as 97.66 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


@contextlib.contextmanager
def progress(command: str, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, then each text that the block passes to the yielded function.

    A terminal shows one line that changes. A file or a pipe gets a line for each text, flushed.
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
