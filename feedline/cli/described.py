"""What `--help` says of a subcommand: a sentence in the list of all, its whole text alone."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap

_ATTRIBUTES = re.compile(r"^\s*Attributes:$", re.MULTILINE)


def described(command: type, *, alone: bool) -> str:
    """A command's docstring without its attributes, which are listed as options.

    tyro wraps no paragraph of it, and in the list of subcommands it would show all of them. It joins lines that
    begin with a letter, so the paragraphs after the first are a list.

    Example:
      >>> class Command:
      ...     '''Do it.
      ...
      ...     In many ways.
      ...     '''
      >>> described(Command, alone=False)
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
