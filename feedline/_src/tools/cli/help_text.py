"""The `--help` text of a subcommand: one sentence in the list of subcommands, or its whole description."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap

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
