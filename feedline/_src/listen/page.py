"""A report as a web page in one file, also for a notebook, or as an SVG picture; and how they are saved."""

from __future__ import annotations

import os
import secrets
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from feedline._src.listen.view import COLORS, Bar, Chart, Kind, View

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
    """Write a page (.html) or a picture (.svg). A file that cannot be written whole does not appear.

    Raises:
      ValueError: the name ends in something else.
      OSError: as the system reports it.
    """
    target = Path(path)
    if target.suffix == ".html":
        content = page(view)
    elif target.suffix == ".svg":
        content = svg(view)
    else:
        raise ValueError(f"a report is saved as .html or as .svg, got {str(target)!r}; rename it")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(content, encoding="utf-8")
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


_WIDTH, _MARGIN = 960, 24
"""Of the picture, in pixels; `y` grows downwards."""
_BARS, _VALUES = 170, 574
"""Where bars and values begin."""
_BAR_HEIGHT = 34
_BOLD, _PALE, _CODE = 'font-weight="600"', 'fill="#4d5660"', 'font-family="monospace"'


def svg(view: View) -> str:
    """A picture of the whole report on white ground. It has no fonts of its own, so lines are broken early."""
    colors = "".join(f".{kind} {{ fill: {light}; stroke: {light} }} " for kind, (light, _) in COLORS.items())
    drawing = _Drawing()
    drawing.text(view.verdict[:1].upper() + view.verdict[1:], 24, _BOLD)
    if view.warning:
        drawing.box("#fdf7dd", (view.warning, ""))
    drawing.box("#eef4fb", (f"Advice: {view.advice}", ""), (view.code, _CODE))
    for chart in view.charts:
        drawing.chart(chart)
    drawing.y += 20
    for name, text in view.notes:
        drawing.text(f"{name}: {text}", 12, _PALE)
    height = drawing.y + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="system-ui, sans-serif" fill="#1f2328">',
            f"<title>{escape(view.verdict)}</title>",
            f"<style>{colors}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *drawing.shapes,
            "</svg>\n",
        ]
    )


class _Drawing:
    """Texts and bars from top to bottom; `y` is where the next one begins."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.y: float = _MARGIN / 2

    def text(self, text: str, size: int, style: str = "", x: int = _MARGIN) -> None:
        """Lines as wide as the picture allows, in a font whose letters are as wide as DejaVu's."""
        wide = size * (0.66 if style == _BOLD else 0.6)
        for line in textwrap.wrap(text, int((_WIDTH - _MARGIN - x) / wide)):
            self.y += 1.4 * size
            self._line(x, self.y - 0.25 * size, line, size, style)

    def box(self, color: str, *paragraphs: tuple[str, str]) -> None:
        """Texts, each with its style, on coloured ground."""
        self.y += 16
        at, top = len(self.shapes), self.y
        self.y += 8
        for text, style in paragraphs:
            self.text(text, 15, style, x=_MARGIN + 16)
        self.y += 10
        width, height = _WIDTH - 2 * _MARGIN, self.y - top
        self.shapes.insert(
            at, f'<rect x="{_MARGIN}" y="{top:.1f}" width="{width}" height="{height:.1f}" rx="4" fill="{color}"/>'
        )

    def chart(self, chart: Chart) -> None:
        """Title, legend and bars."""
        self.y += 22
        self.text(chart.title, 18, _BOLD)
        for kind, text in chart.legend:
            self.shapes.append(f'<g transform="translate({_MARGIN} {self.y + 4:.1f})">{_swatch(kind)}</g>')
            self.text(text, 13, _PALE, x=_MARGIN + 18)
        self.y += 8
        for bar in chart.bars:
            middle = self.y + _BAR_HEIGHT / 2 + 5
            self._line(_MARGIN, middle - (5 if bar.mark else 0), bar.name, 15, _BOLD if bar.mark else "")
            self._line(_MARGIN, middle + 9, bar.mark, 12)
            self.shapes.append(
                f'<svg x="{_BARS}" y="{self.y:.1f}" width="{_VALUES - 14 - _BARS}" height="{_BAR_HEIGHT}">'
                f"{''.join(_shapes(bar, chart))}</svg>"
            )
            self._line(_VALUES, middle, bar.value, 15)
            self._line(_VALUES + 86, middle, bar.note, 12, _PALE)
            self.y += _BAR_HEIGHT

    def _line(self, x: float, y: float, text: str, size: int, style: str = "") -> None:
        if text:
            self.shapes.append(f'<text x="{x}" y="{y:.1f}" font-size="{size}" {style}>{escape(text)}</text>')
