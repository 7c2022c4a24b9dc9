"""A report as an SVG picture, and as a web page that holds it; and how they are saved."""

from __future__ import annotations

import os
import secrets
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from feedline._src.listen.words import STAGES, counted, factor, milliseconds, percent

COLORS = {
    "loop": "#2f6fb7",
    "idle": "#a9c4e2",
    "late": "#8a63b0",
    "wait": "#d95f02",
    "limits": "#d95f02",
    "slow": "#f2b98c",
    "fast": "#b9c0c8",
    "pace": "#1f2328",
}
"""By what bars and lines show. "limits": the stage that limits training; "slow": another one that is slower than
the loop; "pace": the line at the loop's own time."""
_WIDTH, _MARGIN, _BAR_HEIGHT = 960, 24, 34
"""In pixels; `y` grows downwards."""
_BARS, _VALUES = 170, 574
"""Where bars and values begin."""
Report = Any
"""A `Report`, whose module uses this one."""
_BOLD, _PALE = 'font-weight="600"', 'fill="#4d5660"'


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a page (.html) or a picture (.svg). A file that cannot be written whole does not appear.

    Raises:
      ValueError: the name ends in something else.
      OSError: as the system reports it.
    """
    target = Path(path)
    if target.suffix not in (".html", ".svg"):
        raise ValueError(f"a report is saved as .html or as .svg, got {str(target)!r}; rename it")
    picture = svg(report)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(page(report, picture) if target.suffix == ".html" else picture, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def page(report: Report, picture: str) -> str:
    """A page with a picture. It loads nothing and needs no script."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.verdict.partition(':')[0])} – feedline</title>\n"
        f'</head>\n<body style="margin: 0; text-align: center; background: #ffffff">\n{picture}</body>\n</html>\n'
    )


class Bar(NamedTuple):
    """Parts of a time, (what, seconds), one after the other."""

    name: str
    parts: Sequence[tuple[str, float]]
    value: str
    note: str = ""


def svg(report: Report) -> str:
    """A picture of the whole report on white ground. It has no fonts of its own, so lines are broken early."""
    drawing = _Drawing()
    drawing.text(report.verdict[:1].upper() + report.verdict[1:], 24, _BOLD)
    if not report.drained:
        drawing.box(
            "#fdf7dd",
            "Too few batches to be sure: some of them had been read ahead before the loop began, so input may "
            "look faster than it is. Ask for a report after more steps.",
        )
    drawing.box("#eef4fb", f"Advice: {report.advice}")
    _draw_step(drawing, report)
    _draw_stages(drawing, report)
    drawing.y += 20
    for note in _notes(report):
        drawing.text(note, 12, _PALE)
    size = f'width="{_WIDTH}" height="{drawing.y + _MARGIN:.0f}" viewBox="0 0 {_WIDTH} {drawing.y + _MARGIN:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width: 100%; height: auto" '
        f'font-family="system-ui, sans-serif" fill="#1f2328">\n<title>{escape(report.verdict)}</title>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join([*drawing.shapes, "</svg>\n"])
    )


def _draw_step(drawing: _Drawing, report: Report) -> None:
    """One step as it is, and as it is predicted to be after the change."""
    late_s = min(report.late_s, report.loop_s)
    idle_s = min(report.idle_s or 0.0, report.loop_s - late_s)
    parts = {"loop": report.loop_s - late_s - idle_s, "idle": idle_s, "late": late_s, "wait": report.wait_s}
    share = (report.wait_s + late_s) / max(1e-9, report.step_s)
    bars = [Bar("measured", [*parts.items()], _ms(report.step_s), f"wait {percent(share)}")]
    if (change := report.change) is not None:
        then_s = report.loop_s / max(1e-9, 1 - change.wait_share)
        note = f"wait {percent(change.wait_share)}, {change}"
        predicted = [("loop", report.loop_s), ("wait", then_s - report.loop_s)]
        bars.append(Bar("predicted", predicted, _ms(then_s), note))
    legend = {
        "loop": "the loop's own time",
        "idle": "the same while the devices are idle",
        "late": "the loop has the batch, but its transfer goes on",
        "wait": "waiting for input",
    }
    shown = [(kind, f"{text} {_ms(parts[kind])}") for kind, text in legend.items() if parts[kind]]
    drawing.chart(f"One step of the training loop takes {_ms(report.step_s)}", shown, bars)


def _draw_stages(drawing: _Drawing, report: Report) -> None:
    """How long each stage would take for a batch if it worked alone, beside the loop's own time."""
    settings, slow = report.settings, report.straggler
    compute_s = max(1e-9, report.loop_s - report.late_s)
    binds = report.bound
    if slow is not None and binds == "straggler" and slow.process == report.process:
        binds = slow.stage
    bars, shown = [], {"pace"}
    for name in ("read", "host", "place", "compute"):
        seconds = compute_s if name == "compute" else compute_s / report.headroom[name]
        kind = "limits" if name == binds else "slow" if seconds > compute_s else "fast"
        kind = "loop" if name == "compute" else kind
        shown.add(kind)
        headroom = f"headroom {factor(report.headroom[name])} ×"
        bars.append(Bar(STAGES[name], [(kind, seconds)], _ms(seconds), headroom))
    beyond = "what reaches beyond it is slower than training"
    if not settings["prefetch"]:
        beyond = "with prefetch 0 the loop makes each batch itself, so it waits even for fast input"
    legend = {
        "pace": f"the loop's own time {_ms(compute_s)}: {beyond}",
        "limits": "the stage that limits training",
        "slow": "also slower than training",
    }
    kind = "workers" if settings["workers"] else "threads"
    readers = f", with {settings[kind]} {kind}" if settings["prefetch"] and settings[kind] > 1 else ""
    texts = [(kind, text) for kind, text in legend.items() if kind in shown]
    drawing.chart(f"Time for a batch, stage by stage{readers}", texts, bars, compute_s)


def _notes(report: Report) -> list[str]:
    """What was judged, and what the words mean."""
    ahead = "without those" if report.drained else "some of them"
    return [
        "Settings: " + ", ".join(f"{name} {value:,}" for name, value in report.settings.items()),
        *(["Tuning: " + "; ".join(report.tuning)] if report.tuning else []),
        f"Judged by the latest {counted(report.batches, 'batch')} of process {report.process}, {ahead} read ahead "
        f"before the loop began. Processor time: {_ms(report.cpu_s)} a batch, of all threads that made it.",
        "AU, accelerator utilisation: the share of the time in which the devices computed. Headroom: how many "
        "times as fast as the loop a stage would be if it worked alone; at 1 × or less, it makes the loop wait.",
    ]


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

    def box(self, color: str, text: str) -> None:
        """Text on coloured ground."""
        at, top = len(self.shapes), self.y + 16
        self.y = top + 8
        self.text(text, 15, x=_MARGIN + 16)
        self.y += 10
        self.shapes.insert(at, _rectangle(color, _MARGIN, top, _WIDTH - 2 * _MARGIN, self.y - top))

    def chart(
        self, title: str, legend: Sequence[tuple[str, str]], bars: Sequence[Bar], pace_s: float = 0.0
    ) -> None:
        """Bars on one scale, with a line at `pace_s`. The legend comes first: it says how to read them."""
        self.y += 22
        self.text(title, 18, _BOLD)
        for kind, text in legend:
            left, width = (4, 3) if kind == "pace" else (0, 11)
            self.shapes.append(_rectangle(COLORS[kind], _MARGIN + left, self.y + 4, width, 12))
            self.text(text, 13, _PALE, x=_MARGIN + 18)
        self.y += 8
        longest_s = max(1e-9, pace_s, *(sum(seconds for _, seconds in bar.parts) for bar in bars))
        scale = (_VALUES - 14 - _BARS) / (1.02 * longest_s)
        for bar in bars:
            middle, x = self.y + _BAR_HEIGHT / 2 + 5, float(_BARS)
            self._line(_MARGIN, middle, bar.name, 15, _BOLD if bar.parts[0][0] == "limits" else "")
            for kind, seconds in bar.parts:
                shape = _rectangle(COLORS[kind], x, self.y + 0.2 * _BAR_HEIGHT, scale * seconds, 0.6 * _BAR_HEIGHT)
                self.shapes.append(shape.replace("<rect", f'<rect class="{kind}"'))
                x += scale * seconds
            if pace_s:
                self.shapes.append(_rectangle(COLORS["pace"], _BARS + scale * pace_s - 1, self.y, 2, _BAR_HEIGHT))
            self._line(_VALUES, middle, bar.value, 15)
            self._line(_VALUES + 86, middle, bar.note, 12, _PALE)
            self.y += _BAR_HEIGHT

    def _line(self, x: float, y: float, text: str, size: int, style: str = "") -> None:
        if text:
            self.shapes.append(f'<text x="{x}" y="{y:.1f}" font-size="{size}" {style}>{escape(text)}</text>')


def _rectangle(color: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.3f}" height="{height:.1f}" fill="{color}"/>'


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds)} ms"
