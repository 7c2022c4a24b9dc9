"""A report as a web page in one file, also for a notebook; and how a page or a picture is saved."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from html import escape
from pathlib import Path

from feedline._src.observe.view import COLORS, Bar, Chart, Kind, View

_STYLE = """
.feedline-report { color-scheme: light dark; color: light-dark(#1f2328, #e6e9ec);
  background: light-dark(#ffffff, #16191d); font: 15px/1.45 system-ui, sans-serif;
  box-sizing: border-box; max-width: 880px; padding: 20px; text-align: left; overflow-wrap: anywhere }
[data-jp-theme-light="true"] .feedline-report, .vscode-light .feedline-report { color-scheme: light }
[data-jp-theme-light="false"] .feedline-report, .vscode-dark .feedline-report { color-scheme: dark }
.feedline-report p { margin: 0 }
.feedline-report .verdict { font-size: 26px; line-height: 1.25; font-weight: 600 }
.feedline-report .verdict::first-letter { text-transform: uppercase }
.feedline-report .box { margin-top: 16px; padding: 12px 16px; border-left: 4px solid light-dark(#2f6fb7, #5b9be6);
  border-radius: 4px; background: light-dark(#eef4fb, #1d2733) }
.feedline-report .warning { border-color: light-dark(#c9a400, #d9b92b); background: light-dark(#fdf7dd, #2d2916) }
.feedline-report .box b { display: block; font-size: 13px }
.feedline-report code { font: 13px ui-monospace, monospace; background: none; color: inherit; padding: 0 }
.feedline-report .title { margin-top: 28px; font-size: 18px; font-weight: 600 }
.feedline-report .legend { margin: 2px 0 10px; font-size: 13px; color: light-dark(#4d5660, #a9b2bc) }
.feedline-report .legend span { display: inline-block; margin-right: 18px }
.feedline-report .legend svg { margin-right: 5px; vertical-align: -1px }
.feedline-report .bar { display: grid; grid-template-columns: 130px 1fr 250px; column-gap: 14px;
  align-items: center; line-height: 1.2 }
.feedline-report .bar svg { display: block; width: 100%; height: 34px }
.feedline-report .marked .name { font-weight: 600 }
.feedline-report .mark { display: block; font-size: 12px; line-height: 1.1; font-weight: 400 }
.feedline-report .note, .feedline-report dt { color: light-dark(#4d5660, #a9b2bc) }
.feedline-report .note { display: inline-block; margin-left: 10px; font-size: 13px }
.feedline-report dl { margin: 28px 0 0; font-size: 13px }
.feedline-report dt { float: left; margin-right: 8px; font-weight: 600 }
.feedline-report dd { margin: 0 0 4px }
@media (max-width: 640px) {
  .feedline-report { padding: 14px }
  .feedline-report .verdict { font-size: 21px }
  .feedline-report .legend span { display: block }
  .feedline-report .bar { grid-template-columns: auto 1fr; margin-top: 8px }
  .feedline-report .name { grid-row: 1; white-space: nowrap }
  .feedline-report .value { text-align: right }
  .feedline-report .bar svg { grid-row: 2; grid-column: 1 / 3; height: 24px }
}
"""


def save(view: View, path: str | os.PathLike[str]) -> None:
    """Write a page (.html) or a picture (.png). A file that cannot be written whole does not appear.

    Raises:
      ValueError: the name ends in something else.
      ModuleNotFoundError: a picture needs matplotlib.
      OSError: as the system reports it.
    """
    target = Path(path)
    if target.suffix == ".html":
        content = page(view).encode()
    elif target.suffix == ".png":
        from feedline._src.observe.picture import png

        content = png(view)
    else:
        raise ValueError(f"a report is saved as .html or as .png, got {str(target)!r}; rename it")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def page(view: View) -> str:
    """A whole page. It loads nothing and needs no script."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(view.verdict.partition(':')[0])} – feedline</title>\n"
        f"<style>\nhtml {{ color-scheme: light dark; background: light-dark(#ffffff, #16191d) }}\n"
        "body { margin: 0 }\n.feedline-report { margin: 0 auto }\n</style>\n"
        f"</head>\n<body>\n{html_of(view)}\n</body>\n</html>\n"
    )


def html_of(view: View) -> str:
    """The page without its frame, with its style."""
    colors = "\n".join(
        f".feedline-report .{kind} {{ fill: light-dark({light}, {dark}); stroke: light-dark({light}, {dark}) }}"
        for kind, (light, dark) in COLORS.items()
    )
    warning = f'<p class="box warning">{escape(view.warning)}</p>' if view.warning else ""
    code = f"<p><code>{escape(view.code)}</code></p>" if view.code else ""
    notes = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in view.notes)
    return "\n".join(
        [
            f'<div class="feedline-report"><style>{_STYLE}{colors}</style>',
            f'<p class="verdict" role="heading" aria-level="1">{escape(view.verdict)}</p>',
            warning,
            f'<div class="box"><b>Advice</b><p>{escape(view.advice)}</p>{code}</div>',
            *(_chart(chart) for chart in view.charts),
            f"<dl>{notes}</dl>",
            "</div>",
        ]
    )


def _chart(chart: Chart) -> str:
    legend = "".join(f"<span>{_swatch(kind)}{escape(text)}</span>" for kind, text in chart.legend)
    return "\n".join(
        [
            f'<p class="title" role="heading" aria-level="2">{escape(chart.title)}</p>',
            f'<p class="legend">{legend}</p>',
            *(_bar(bar, chart) for bar in chart.bars),
        ]
    )


def _swatch(kind: Kind) -> str:
    x, width = (4, 3) if kind == "pace" else (0, 11)
    return (
        '<svg width="11" height="12" aria-hidden="true">'
        f'<rect class="{kind}" x="{x}" width="{width}" height="12" stroke-width="0"/></svg>'
    )


def _bar(bar: Bar, chart: Chart) -> str:
    """One line: name, bar and value. On a narrow screen the bar lies beneath the others."""
    mark = f'<span class="mark">{escape(bar.mark)}</span>' if bar.mark else ""
    note = f'<span class="note">{escape(bar.note)}</span>' if bar.note else ""
    return (
        f'<div class="bar{" marked" * bool(bar.mark)}"><span class="name">{escape(bar.name)}{mark}</span>'
        f'<svg role="img" aria-label="{escape(f"{bar.name}: {bar.value}")}">{"".join(_shapes(bar, chart))}</svg>'
        f'<span class="value">{escape(bar.value)}{note}</span></div>'
    )


def _shapes(bar: Bar, chart: Chart) -> Sequence[str]:
    shapes, x = [], 0.0
    for part in bar.parts:
        width = 100 * part.seconds / chart.scale_s
        shapes.append(
            f'<rect class="{part.kind}" x="{x:.3f}%" y="20%" width="{width:.3f}%" height="60%" stroke-width="0"/>'
        )
        x += width
    if chart.pace_s is not None:
        at = f"{100 * chart.pace_s / chart.scale_s:.3f}%"
        shapes.append(f'<line class="pace" x1="{at}" x2="{at}" y1="0" y2="100%" stroke-width="2"/>')
    return shapes
