"""A report as an SVG picture, and as a web page that holds it; and how they are saved."""

from __future__ import annotations

import os
import secrets
import textwrap
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from feedline._src.listen.words import STAGES, factor, milliseconds, percent

Report = Any
"""A `Report`, whose module uses this one."""
_LOOP = "the loop's own time"
COLORS = {
    _LOOP: "#2f6fb7",
    "in it, the devices are idle": "#a9c4e2",
    "in it, the batch is still being transferred": "#8a63b0",
    "waiting for input": "#d95f02",
    "the stage that limits training": "#d95f02",
    "another stage, alone": "#b9c0c8",
}
"""What the parts of bars mean."""
_WIDTH, _MARGIN, _ROW = 960, 24, 32
_BARS, _VALUES = 170, 620
"""In pixels: where bars and values begin. `y` grows downwards."""


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a page (.html) or a picture (.svg). A file that cannot be written whole does not appear.

    Raises:
      ValueError: the name ends in something else.
      OSError: the file cannot be written.
    """
    target = Path(path)
    if target.suffix not in (".html", ".svg"):
        raise ValueError(f"a report is saved as .html or as .svg, got {str(target)!r}; rename it")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(page(report) if target.suffix == ".html" else svg(report), encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def page(report: Report) -> str:
    """A page with the picture. It loads nothing and needs no script."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.verdict.partition(':')[0])} – feedline</title>\n"
        '</head>\n<body style="margin: 0; text-align: center; background: #ffffff">\n'
        f"{svg(report)}</body>\n</html>\n"
    )


class Bar(NamedTuple):
    """The parts of a time, (what it is, seconds), one after the other."""

    name: str
    parts: list[tuple[str, float]]
    note: str


def svg(report: Report) -> str:
    """A picture of the whole report on white ground."""
    bars, loop_s = _bars(report), max(1e-9, report.loop_s - report.late_s)
    longest_s = max(loop_s, *(sum(seconds for _, seconds in bar.parts) for bar in bars))
    scale = (_VALUES - _BARS - 14) / longest_s  # pixels a second
    shapes: list[str] = []
    y = _texts(shapes, report.verdict[:1].upper() + report.verdict[1:], 22, _MARGIN, bold=True)
    y = _texts(shapes, f"Advice: {report.advice}", 15, y + 12) + 16
    for kind in dict.fromkeys(kind for bar in bars for kind, seconds in bar.parts if seconds):
        shapes.append(_rectangle(_MARGIN, y + 3, 12, 12, COLORS[kind]))
        y = _texts(shapes, kind, 13, y, x=_MARGIN + 20)
    y += 10
    top = y
    for bar in bars:
        x = float(_BARS)
        shapes.append(_text(_MARGIN, y + 21, 15, bar.name))
        for kind, seconds in bar.parts:
            shape = _rectangle(x, y + 6, scale * seconds, _ROW - 12, COLORS[kind])
            shapes.append(f"<g><title>{escape(kind)}</title>{shape}</g>")
            x += scale * seconds
        total_s = sum(seconds for _, seconds in bar.parts)
        shapes.append(_text(_VALUES, y + 21, 15, f"{milliseconds(total_s)} ms"))
        shapes.append(_text(_VALUES + 90, y + 21, 12, bar.note))
        y += _ROW
    shapes.append(_rectangle(_BARS + scale * loop_s - 1, top, 2, y - top, "#1f2328"))
    y = _texts(shapes, f"black line: {_LOOP}. Stages beyond it are slower than training.", 13, y + 4) + 12
    settings = ", ".join(f"{name} {value:,}" for name, value in report.settings.items())
    for line in [*str(report).splitlines()[1:-1], f"  process {report.process}: {settings}"]:
        y = _texts(shapes, line, 12, y, monospace=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + _MARGIN:.0f}" '
        f'viewBox="0 0 {_WIDTH} {y + _MARGIN:.0f}" style="max-width: 100%; height: auto" '
        f'font-family="system-ui, sans-serif" fill="#1f2328">\n<title>{escape(report.verdict)}</title>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join([*shapes, "</svg>\n"])
    )


def _bars(report: Report) -> list[Bar]:
    """One step as it is, as it is predicted to be after the change, and each stage alone."""
    loop, idle, late, wait, limits, other = COLORS
    late_s = min(report.late_s, report.loop_s)
    idle_s = min(report.idle_s or 0.0, report.loop_s - late_s)
    compute_s = max(1e-9, report.loop_s - report.late_s)
    parts = [(loop, report.loop_s - late_s - idle_s), (idle, idle_s), (late, late_s), (wait, report.wait_s)]
    share = (report.wait_s + late_s) / max(1e-9, report.step_s)
    bars = [Bar("one step", parts, f"wait {percent(share)}")]
    if (change := report.change) is not None:
        wait_s = report.loop_s * change.wait_share / max(1e-9, 1 - change.wait_share)
        note = f"wait {percent(change.wait_share)}, {change}"
        bars.append(Bar("predicted", [(loop, report.loop_s), (wait, wait_s)], note))
    slow, bound = report.straggler, report.bound
    here = slow is not None and slow.process == report.process
    for name in ("read", "host", "place"):
        kind = limits if name == (slow.stage if slow is not None and here else bound) else other
        headroom = report.headroom[name]
        bars.append(Bar(STAGES[name], [(kind, compute_s / headroom)], f"headroom {factor(headroom)} ×"))
    return bars


def _texts(
    shapes: list[str],
    text: str,
    size: int,
    y: float,
    x: int = _MARGIN,
    *,
    bold: bool = False,
    monospace: bool = False,
) -> float:
    """Add lines below `y`, broken early because the picture has no fonts of its own. Returns where they end."""
    style = 'font-weight="600"' if bold else 'font-family="monospace" xml:space="preserve"' if monospace else ""
    indent = " " * (len(text) - len(text.lstrip()))
    width = int((_WIDTH - _MARGIN - x) / (size * (0.66 if bold else 0.61)))
    for line in textwrap.wrap(text, width, subsequent_indent=indent):
        y += 1.4 * size
        shapes.append(_text(x, y - 0.25 * size, size, line, style))
    return y


def _text(x: float, y: float, size: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y:.1f}" font-size="{size}" {style}>{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.3f}" height="{height:.1f}" fill="{color}"/>'
