"""Text from outside, such as names of files, as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with escape sequences and other control characters written out: a terminal would obey them.

    Example:
      >>> print(printable("größe\\x1b[31m.npy"))
      größe\\x1b[31m.npy
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
