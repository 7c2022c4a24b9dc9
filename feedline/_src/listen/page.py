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
_BOLD, _PALE, _CODE = 'font-weight="600"', 'fill="#4d5660"', 'font-family="monospace"'


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
    """Parts of a time, (what, seconds), one after the other. `mark` distinguishes this bar from the others."""

    name: str
    parts: Sequence[tuple[str, float]]
    value: str
    note: str = ""
    mark: str = ""


def svg(report: Report) -> str:
    """A picture of the whole report on white ground. It has no fonts of its own, so lines are broken early."""
    drawing = _Drawing()
    drawing.text(report.verdict[:1].upper() + report.verdict[1:], 24, _BOLD)
    if not report.drained:
        warning = (
            "Too few batches to be sure: some of them had been read ahead before the loop began, so input may "
            "look faster than it is. Ask for a report after more steps."
        )
        drawing.box("#fdf7dd", (warning, ""))
    drawing.box("#eef4fb", (f"Advice: {report.advice}", ""), (_code(report), _CODE))
    if (slow := report.straggler) is not None:
        drawing.chart(
            f"Process {slow.process} is slower than the others: {STAGES[slow.stage]}, time of threads for a batch",
            [("limits", "the process that holds up the others")],
            [
                Bar(
                    f"process {slow.process}", [("limits", slow.stage_s)], _ms(slow.stage_s), "", "limits training"
                ),
                Bar("other processes", [("fast", slow.others_s)], _ms(slow.others_s), "median"),
            ],
        )
    _draw_step(drawing, report)
    _draw_stages(drawing, report)
    drawing.y += 20
    for note in _notes(report):
        drawing.text(note, 12, _PALE)
    size = f'width="{_WIDTH}" height="{drawing.y + _MARGIN:.0f}" viewBox="0 0 {_WIDTH} {drawing.y + _MARGIN:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width: 100%; height: auto" '
            'font-family="system-ui, sans-serif" fill="#1f2328">',
            f"<title>{escape(report.verdict)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *drawing.shapes,
            "</svg>\n",
        ]
    )


def _code(report: Report) -> str:
    """The advised change in Python; empty if the advice is no setting."""
    if (change := report.change) is None:
        return ""
    room, _, name = change.setting.rpartition(".")
    setting = f"{name}={change.then}" + (f", buffer={change.buffer[1]}" if change.buffer else "")
    return f"feedline.Feed(..., reading=feedline.Reading({setting}))" if room else f"feedline.Feed(..., {setting})"


def _draw_step(drawing: _Drawing, report: Report) -> None:
    """One step as it is, and as it is predicted to be after the change."""
    step_s, wait_s, late_s = max(1e-9, report.step_s), report.wait_s, min(report.late_s, report.loop_s)
    loop_s = report.loop_s - late_s
    idle_s = min(report.idle_s or 0.0, loop_s)
    parts = [("loop", loop_s - idle_s), ("idle", idle_s), ("late", late_s), ("wait", wait_s)]
    bars = [Bar("measured", parts, _ms(report.step_s), f"wait {percent((wait_s + late_s) / step_s)}")]
    if (change := report.change) is not None:
        then_s = report.loop_s / max(1e-9, 1 - change.wait_share)
        note = f"wait {percent(change.wait_share)}, {change.setting.removeprefix('Reading.')} "
        note += f"{change.now} → {change.then}" + (
            ", buffer {} → {}".format(*change.buffer) if change.buffer else ""
        )
        parts = [("loop", report.loop_s), ("wait", then_s - report.loop_s)]
        bars.append(Bar("predicted", parts, _ms(then_s), note))
    legend = [
        ("loop", f"the loop's own time {_ms(loop_s)}"),
        ("idle", f"of which the devices are idle {_ms(idle_s)}"),
        ("late", f"the loop has the batch, but its transfer goes on {_ms(late_s)}"),
        ("wait", f"waiting for input {_ms(wait_s)}"),
    ]
    shown = {"loop": True, "idle": idle_s >= 0.01 * step_s, "late": late_s >= 0.01 * step_s, "wait": True}
    where = "" if report.straggler is None else f" in process {report.process}"
    title = f"One step of the training loop{where} takes {_ms(report.step_s)}"
    drawing.chart(title, [each for each in legend if shown[each[0]]], bars)


def _draw_stages(drawing: _Drawing, report: Report) -> None:
    """How long each stage would take for a batch if it worked alone, beside the loop's own time."""
    settings, slow = report.settings, report.straggler
    compute_s = max(1e-9, report.loop_s - report.late_s)
    binds = {"compute": "compute", "loop": "compute"}.get(report.bound, report.bound)
    if slow is not None and report.bound == "straggler":
        binds = slow.stage if slow.process == report.process else ""
    seconds = {name: compute_s / report.headroom[name] for name in ("read", "host", "place")}
    kinds = {name: "slow" if each >= compute_s else "fast" for name, each in seconds.items()}
    if binds in kinds:
        kinds[binds] = "limits"
    kinds["compute"], seconds["compute"] = "loop", compute_s
    bars = [
        Bar(
            STAGES[name],
            [(kinds[name], each)],
            _ms(each),
            f"headroom {factor(report.headroom[name])} ×",
            "limits training" if name == binds else "",
        )
        for name, each in seconds.items()
    ]
    beyond = "what reaches beyond it is slower than training"
    if not settings["prefetch"]:
        beyond = "with prefetch 0 the loop makes each batch itself, so it waits even for fast input"
    legend = [("pace", f"the loop's own time {_ms(compute_s)}: {beyond}")]
    legend += [("limits", "the stage that limits training")] if "limits" in kinds.values() else []
    legend += [("slow", "also slower than training")] if "slow" in kinds.values() else []
    name = "workers" if settings["workers"] else "threads"
    shared = f", with {settings[name]} {name}" if settings["prefetch"] and settings[name] > 1 else ""
    drawing.chart(f"Time for a batch, stage by stage{shared}", legend, bars, compute_s)


def _notes(report: Report) -> list[str]:
    """What was judged, and what the words mean."""
    ahead = "without those" if report.drained else "some of them"
    whose = "" if report.straggler is None else ", in the process that waits most"
    return [
        "Settings: " + ", ".join(f"{name} {value:,}" for name, value in report.settings.items()),
        *(["Tuning: " + "; ".join(report.tuning)] if report.tuning else []),
        f"Judged by the latest {counted(report.batches, 'batch')} of process {report.process}, {ahead} read ahead "
        f"before the loop began. Processor time: {_ms(report.cpu_s)} a batch, of all threads that made it.",
        f"AU, accelerator utilisation: the share of the time in which the devices computed{whose}.",
        "Headroom: how many times as fast as the training loop a stage would be if it worked alone. At 1 × or "
        "less, the stage makes the loop wait.",
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

    def box(self, color: str, *paragraphs: tuple[str, str]) -> None:
        """Texts, each with its style, on coloured ground."""
        self.y += 16
        at, top = len(self.shapes), self.y
        self.y += 8
        for text, style in paragraphs:
            self.text(text, 15, style, x=_MARGIN + 16)
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
            self._line(_MARGIN, middle - (5 if bar.mark else 0), bar.name, 15, _BOLD if bar.mark else "")
            self._line(_MARGIN, middle + 9, bar.mark, 12)
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
