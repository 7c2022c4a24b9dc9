"""What an object shows of itself in a notebook: a small table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_LEFT = ' style="text-align: left"'


def table(caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table. The first cell of a row names what the others say. All text is escaped.

    Example:
      >>> table("a < b", [("rows", "5")])
      '<table><caption>a &lt; b</caption><tr><th style="text-align: left">rows</th><td style="text-align: left">5</td></tr></table>'
    """  # noqa: E501
    lines = ["".join(_cell("td" if column else "th", text) for column, text in enumerate(row)) for row in rows]
    if head:
        lines.insert(0, "".join(_cell("th", text) for text in head))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{html.escape(caption)}</caption>{body}</table>"


def _cell(tag: str, text: str) -> str:
    return f"<{tag}{_LEFT}>{html.escape(text)}</{tag}>"
