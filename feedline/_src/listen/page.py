"""A report as an SVG picture, and as a web page with that picture. `written_whole` replaces files atomically."""

from __future__ import annotations

import contextlib
import secrets
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from feedline._src.listen.words import STAGES, factor, milliseconds, percent

Report = Any
"""`report.Report`, which is not imported here, because its module imports this one."""
COLORS = {
    "the loop's own time": "#2f6fb7",
    "the loop's own time, with idle devices": "#a9c4e2",
    "the loop's own time, with its batch still in transfer": "#8a63b0",
    "waiting for input": "#d95f02",
    "the stage that limits training": "#d95f02",
    "another stage, alone": "#b9c0c8",
}
"""{meaning of a part of a bar: its color}. The legend shows the meanings."""
_WIDTH, _MARGIN, _ROW = 960, 24, 32
_BARS, _VALUES = 170, 620
"""The `x`, in pixels, where bars and values begin. `y` grows downwards."""
Bar = tuple[str, list[tuple[str, float]], str]
"""(name, parts, note). `parts`: (meaning, seconds) for each part of the bar, from left to right."""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. Its file then replaces `path`; after an error, `path` is unchanged."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def page(report: Report) -> str:
    """A page with the picture. It loads no other files and needs no script."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(report.verdict.partition(':')[0])} – feedline</title>\n"
        '</head>\n<body style="margin: 0; text-align: center; background: #ffffff">\n'
        f"{svg(report)}</body>\n</html>\n"
    )


def svg(report: Report) -> str:
    """A picture of the whole report on a white background."""
    bars, loop_s = _bars(report), max(1e-9, report.loop_s - report.late_s)
    longest_s = max(loop_s, *(_total_s(bar) for bar in bars))
    scale = (_VALUES - _BARS - 14) / longest_s  # pixels per second
    shapes: list[str] = []
    y = _texts(shapes, report.verdict[:1].upper() + report.verdict[1:], 22, _MARGIN, 'font-weight="600"')
    y = _texts(shapes, f"Advice: {report.advice}", 15, y + 12) + 16
    for kind in dict.fromkeys(kind for _, parts, _ in bars for kind, seconds in parts if seconds):
        shapes.append(_rectangle(_MARGIN, y + 3, 12, 12, COLORS[kind]))
        y = _texts(shapes, kind, 13, y, x=_MARGIN + 20)
    y += 10
    top = y
    for bar in bars:
        name, parts, note = bar
        x = float(_BARS)
        shapes.append(_text(_MARGIN, y + 21, 15, name))
        for kind, seconds in parts:
            shape = _rectangle(x, y + 6, scale * seconds, _ROW - 12, COLORS[kind])
            shapes.append(f"<g><title>{escape(kind)}</title>{shape}</g>")
            x += scale * seconds
        shapes.append(_text(_VALUES, y + 21, 15, f"{milliseconds(_total_s(bar))} ms"))
        shapes.append(_text(_VALUES + 90, y + 21, 12, note))
        y += _ROW
    shapes.append(_rectangle(_BARS + scale * loop_s - 1, top, 2, y - top, "#1f2328"))
    y = _texts(shapes, "black line: the loop's own time. Stages beyond it are slower than training.", 13, y + 4)
    settings = ", ".join(f"{name} {value:,}" for name, value in report.settings.items())
    y += 12
    for line in [*str(report).splitlines()[1:-1], f"  process {report.process}: {settings}"]:
        y = _texts(shapes, line, 12, y, 'font-family="monospace" xml:space="preserve"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + _MARGIN:.0f}" '
        f'viewBox="0 0 {_WIDTH} {y + _MARGIN:.0f}" style="max-width: 100%; height: auto" '
        f'font-family="system-ui, sans-serif" fill="#1f2328">\n<title>{escape(report.verdict)}</title>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join([*shapes, "</svg>\n"])
    )


def _bars(report: Report) -> list[Bar]:
    """The bars: one step now, one step as predicted after the advised change, and each stage alone."""
    loop, idle, late, wait, limits, other = COLORS
    late_s = min(report.late_s, report.loop_s)
    idle_s = min(report.idle_s or 0.0, report.loop_s - late_s)
    compute_s = max(1e-9, report.loop_s - report.late_s)
    parts = [(loop, report.loop_s - late_s - idle_s), (idle, idle_s), (late, late_s), (wait, report.wait_s)]
    share = (report.wait_s + late_s) / max(1e-9, report.step_s)
    bars: list[Bar] = [("one step", parts, f"wait {percent(share)}")]
    if (change := report.change) is not None:
        wait_s = report.loop_s * change.wait_share / max(1e-9, 1 - change.wait_share)
        note = f"wait {percent(change.wait_share)}, {change}"
        bars.append(("predicted", [(loop, report.loop_s), (wait, wait_s)], note))
    slow = report.straggler
    limit = report.bound if report.waits else ""
    if slow is not None and slow.process == report.process:
        limit = slow.stage
    for name in ("read", "host", "place"):
        headroom = report.headroom[name]
        part = limits if name == limit else other, compute_s / headroom
        bars.append((STAGES[name], [part], f"headroom {factor(headroom)} ×"))
    return bars


def _total_s(bar: Bar) -> float:
    return sum(seconds for _, seconds in bar[1])


def _texts(shapes: list[str], text: str, size: int, y: float, style: str = "", x: int = _MARGIN) -> float:
    """Add lines below `y`, wrapped early since the viewer's font may be wide. Returns the `y` below them."""
    indent = " " * (len(text) - len(text.lstrip()))
    width = int((_WIDTH - _MARGIN - x) / (0.66 * size))
    for line in textwrap.wrap(text, width, subsequent_indent=indent):
        y += 1.4 * size
        shapes.append(_text(x, y - 0.25 * size, size, line, style))
    return y


def _text(x: float, y: float, size: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y:.1f}" font-size="{size}" {style}>{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.3f}" height="{height:.1f}" fill="{color}"/>'
