"""A report as a picture, by matplotlib."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from feedline._src.observe.view import COLORS, Bar, Chart, View

_WIDTH, _MARGIN = 10.0, 0.4
"""Lengths are inches; `y` grows downwards."""
_BARS, _VALUES = 2.0, 7.1
"""Where bars and values begin."""
_POINT = 1 / 72
_PALE = "#4d5660"


def figure(view: View) -> Any:
    """A `matplotlib.figure.Figure`.

    Raises:
      ModuleNotFoundError: matplotlib is missing; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib; from the clone: pip install '.[bench]'") from error
    drawing = _Drawing(Figure(facecolor="white"))
    drawing.text(view.verdict[:1].upper() + view.verdict[1:], size=17, weight="bold")
    if view.warning:
        drawing.box("#fdf7dd", (view.warning, "sans-serif"))
    drawing.box("#eef4fb", (f"Advice: {view.advice}", "sans-serif"), (view.code, "monospace"))
    for chart in view.charts:
        drawing.chart(chart)
    drawing.y += 0.25
    for name, text in view.notes:
        drawing.text(f"{name}: {text}", size=8.5, color=_PALE)
    drawing.finish()
    return drawing.figure


def png(view: View) -> bytes:
    """The picture as a PNG file, 1,600 pixels wide."""
    buffer = io.BytesIO()
    figure(view).savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


class _Drawing:
    """Draws from top to bottom; `y` is where the next thing begins."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure
        self.y = _MARGIN
        self._axes = figure.add_axes((0, 0, 1, 1))
        self._axes.axis("off")

    def text(self, text: str, size: float, x: float = _MARGIN, **style: Any) -> None:
        """Lines as wide as the picture allows."""
        wide = 0.66 if style.get("weight") == "bold" else 0.6
        lines = textwrap.wrap(text, int((_WIDTH - _MARGIN - x) / (wide * size * _POINT)))
        self._write(x, self.y, "\n".join(lines), va="top", size=size, linespacing=1.3, **style)
        self.y += len(lines) * 1.45 * size * _POINT

    def box(self, color: str, *paragraphs: tuple[str, str]) -> None:
        """Text, each in its family of fonts, on coloured ground."""
        self.y += 0.15
        top = self.y
        self.y += 0.12
        for text, family in paragraphs:
            self.text(text, size=11, x=_MARGIN + 0.15, family=family)
        self.y += 0.08
        height, width = self.y - top, _WIDTH - 2 * _MARGIN
        self._axes.barh(top + height / 2, width, height, left=_MARGIN, color=color, linewidth=0, zorder=0)

    def chart(self, chart: Chart) -> None:
        """Title, legend and bars."""
        self.y += 0.25
        self.text(chart.title, size=12.5, weight="bold")
        for kind, text in chart.legend:
            left, width = (0.05, 0.03) if kind == "pace" else (0.0, 0.13)
            self._rectangle(_MARGIN + left, self.y + 0.02, width, 0.13, kind)
            self.text(text, size=9, x=_MARGIN + 0.22, color=_PALE)
        self.y += 0.08
        top = self.y
        for bar in chart.bars:
            self._bar(bar, chart.scale_s)
        if chart.pace_s is not None:
            at = _BARS + (_VALUES - 0.2 - _BARS) * chart.pace_s / chart.scale_s
            self._rectangle(at - 0.01, top, 0.02, self.y - top, "pace")

    def _bar(self, bar: Bar, scale_s: float) -> None:
        middle, x = self.y + 0.18, _BARS
        for part in bar.parts:
            width = (_VALUES - 0.2 - _BARS) * part.seconds / scale_s
            self._rectangle(x, self.y + 0.07, width, 0.22, part.kind)
            x += width
        name = middle - 0.07 if bar.mark else middle
        self._write(_MARGIN, name, bar.name, va="center", size=10.5, weight="bold" if bar.mark else "normal")
        self._write(_MARGIN, middle + 0.09, bar.mark, va="center", size=8)
        self._write(_VALUES, middle, bar.value, va="center", size=10.5)
        self._write(_VALUES + 0.85, middle, bar.note, va="center", size=8.5, color=_PALE)
        self.y += 0.36

    def finish(self) -> None:
        """Give the picture the height of what was drawn."""
        height = self.y + _MARGIN / 2
        self.figure.set_size_inches(_WIDTH, height)
        self._axes.set(xlim=(0, _WIDTH), ylim=(height, 0))

    def _write(self, x: float, y: float, text: str, **style: Any) -> None:
        self._axes.text(x, y, text.replace("$", r"\$"), **{"color": "#1f2328", **style})

    def _rectangle(self, x: float, y: float, width: float, height: float, kind: Any) -> None:
        self._axes.barh(y + height / 2, width, height, left=x, color=COLORS[kind][0], linewidth=0)
