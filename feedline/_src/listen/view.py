"""`View`: what a report shows, as sentences and bars; `page.py` draws it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from feedline._src.listen.words import STAGES, counted, milliseconds, percent, times

Kind = Literal["loop", "idle", "late", "wait", "limits", "slow", "fast", "pace"]
"""What a colour stands for. "limits": the stage that limits training; "slow": another one that is slower than the
loop; "pace": the line at the loop's own time."""
COLORS: dict[Kind, tuple[str, str]] = {
    "loop": ("#2f6fb7", "#5b9be6"),
    "idle": ("#a9c4e2", "#36567c"),
    "late": ("#8a63b0", "#b390dc"),
    "wait": ("#d95f02", "#f0883e"),
    "limits": ("#d95f02", "#f0883e"),
    "slow": ("#f2b98c", "#8f5a30"),
    "fast": ("#b9c0c8", "#5b6570"),
    "pace": ("#1f2328", "#e6e9ec"),
}
"""Of bars and lines, on a light and on a dark ground."""


class Part(NamedTuple):
    """A part of a bar."""

    kind: Kind
    seconds: float


class Bar(NamedTuple):
    """Parts one after the other. `mark` is a word that distinguishes this bar from the others."""

    name: str
    parts: Sequence[Part]
    value: str
    note: str = ""
    mark: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return sum(part.seconds for part in self.parts)


class Chart(NamedTuple):
    """Bars on one scale. The legend comes first, because it says how to read them."""

    title: str
    legend: Sequence[tuple[Kind, str]]
    bars: Sequence[Bar]
    pace_s: float | None = None

    @property
    def scale_s(self) -> float:
        """The time that the whole width stands for."""
        return 1.02 * max(1e-9, self.pace_s or 0.0, *(bar.seconds for bar in self.bars))


@dataclasses.dataclass(frozen=True)
class View:
    """What a report shows, from top to bottom.

    Attributes:
      verdict: the headline.
      warning: why the report may be wrong; empty: no reason.
      advice: one sentence.
      code: how that is written in Python; empty: it is not a setting.
      charts: a step, the stages, and processes if one is slower than the others.
      notes: what was judged, and what the words mean.
    """

    verdict: str
    warning: str
    advice: str
    code: str
    charts: Sequence[Chart]
    notes: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, verdict: str, report: Mapping[str, Any]) -> View:
        """What is shown of the values of `Report.to_dict()`."""
        charts = [_step(report), _stages(report)]
        if report["straggler"] is not None:
            charts.insert(0, _processes(report["straggler"]))
        return cls(verdict, _warning(report), report["advice"], _code(report["change"]), charts, _notes(report))


def _warning(report: Mapping[str, Any]) -> str:
    if report["drained"]:
        return ""
    return (
        "Too few batches to be sure: some of them had been read ahead before the loop began, so input may look "
        "faster than it is. Ask for a report after more steps."
    )


def _code(change: Mapping[str, Any] | None) -> str:
    if change is None:
        return ""
    room, _, name = change["setting"].rpartition(".")
    setting = f"{name}={change['then']}"
    if change.get("buffer"):
        setting += f", buffer={change['buffer'][1]}"
    return f"feedline.Feed(..., reading=feedline.Reading({setting}))" if room else f"feedline.Feed(..., {setting})"


def _step(report: Mapping[str, Any]) -> Chart:
    """One step as it is, and as it is predicted to be after the change."""
    step_s, wait_s, late_s = report["step_s"], report["wait_s"], min(report["late_s"], report["loop_s"])
    loop_s = report["loop_s"] - late_s
    idle_s = min(report.get("idle_s") or 0.0, loop_s)
    idle = [Part("idle", idle_s)] if idle_s else []
    now = [Part("loop", loop_s - idle_s), *idle, Part("late", late_s), Part("wait", wait_s)]
    bars = [Bar("measured", now, _ms(step_s), f"wait {percent((wait_s + late_s) / max(1e-9, step_s))}")]
    change = report["change"]
    if change is not None:
        then_s = report["loop_s"] / max(1e-9, 1 - change["wait_share"])
        then = [Part("loop", report["loop_s"]), Part("wait", then_s - report["loop_s"])]
        name = change["setting"].removeprefix("Reading.")
        with_it = f"wait {percent(change['wait_share'])}, {name} {change['now']} → {change['then']}"
        if change.get("buffer"):
            with_it += ", buffer {} → {}".format(*change["buffer"])
        bars.append(Bar("predicted", then, _ms(then_s), with_it))
    straggler = report["straggler"]
    elsewhere = straggler is not None and straggler["process"] != report["process"]
    others = f", in which its step waits for process {straggler['process']}" if elsewhere else ""
    legend: list[tuple[Kind, str]] = [("loop", f"the loop's own time {_ms(loop_s)}{others}")]
    if idle_s >= 0.01 * step_s:
        legend.append(("idle", f"of which the devices are idle {_ms(idle_s)}"))
    if late_s >= 0.01 * step_s:
        legend.append(("late", f"the loop has the batch, but its transfer goes on {_ms(late_s)}"))
    legend.append(("wait", f"waiting for input {_ms(wait_s)}"))
    where = "" if straggler is None else f" in process {report['process']}"
    return Chart(f"One step of the training loop{where} takes {_ms(step_s)}", legend, bars)


def _stages(report: Mapping[str, Any]) -> Chart:
    """How long each stage would take for a batch if it worked alone, beside the loop's own time."""
    compute_s = max(1e-9, report["loop_s"] - report["late_s"])
    alone_s = {name: compute_s / report["headroom"][name] for name in ("read", "host", "place")}
    binds = report["bound"]
    if binds == "straggler":
        straggler = report["straggler"]
        binds = straggler["stage"] if straggler["process"] == report["process"] else None
    parts = {
        name: Part("limits" if name == binds else "slow" if seconds >= compute_s else "fast", seconds)
        for name, seconds in alone_s.items()
    }
    bars = [
        Bar(
            STAGES[name],
            [part],
            _ms(part.seconds),
            f"headroom {times(report['headroom'][name])}",
            "limits training" if name == binds else "",
        )
        for name, part in parts.items()
    ]
    bars.append(_input(report["settings"], parts))
    bars.append(
        Bar(
            STAGES["compute"],
            [Part("loop", compute_s)],
            _ms(compute_s),
            f"headroom {times(report['headroom']['compute'])}",
            "limits training" if binds in ("compute", "loop") else "",
        )
    )
    beyond = "what reaches beyond it is slower than training"
    if not report["settings"]["prefetch"]:
        beyond = "with prefetch 0 the loop makes each batch itself, so it waits even for fast input"
    legend: list[tuple[Kind, str]] = [("pace", f"the loop's own time {_ms(compute_s)}: {beyond}")]
    if binds in parts:
        legend.append(("limits", "the stage that limits training"))
    if any(part.kind == "slow" for part in parts.values()):
        legend.append(("slow", "also slower than training"))
    return Chart(f"Time for a batch, stage by stage{_readers(report['settings'])}", legend, bars, compute_s)


def _readers(settings: Mapping[str, int]) -> str:
    """How many share the work, where the times are divided by that."""
    name = "workers" if settings["workers"] else "threads"
    return f", with {settings[name]} {name}" if settings["prefetch"] and settings[name] > 1 else ""


def _input(settings: Mapping[str, int], parts: Mapping[str, Part]) -> Bar:
    """The stages together. Threads do them one after the other; beside workers, a thread places."""
    made, placed = [parts["read"], parts["host"]], [parts["place"]]
    if settings["workers"]:
        slower = max(made, placed, key=lambda each: sum(part.seconds for part in each))
        return Bar("all input", slower, _ms(sum(part.seconds for part in slower)), "placing overlaps with it")
    together = [*made, *placed]
    return Bar("all input", together, _ms(sum(part.seconds for part in together)), "one stage after the other")


def _processes(straggler: Mapping[str, Any]) -> Chart:
    """The slow process beside the others."""
    return Chart(
        f"Process {straggler['process']} is slower than the others: {STAGES[straggler['stage']]}, time of threads "
        "for a batch",
        [("limits", "the process that holds up the others")],
        [
            Bar(
                f"process {straggler['process']}",
                [Part("limits", straggler["stage_s"])],
                _ms(straggler["stage_s"]),
                mark="limits training",
            ),
            Bar("other processes", [Part("fast", straggler["others_s"])], _ms(straggler["others_s"]), "median"),
        ],
    )


def _notes(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = ", ".join(f"{name} {value:,}" for name, value in report["settings"].items())
    ahead = "without those" if report["drained"] else "some of them"
    whose = "" if report["straggler"] is None else ", in the process that waits most"
    tuning = report.get("tuning") or ()
    return [
        ("Settings", settings),
        *([("Tuning", "; ".join(tuning))] if tuning else []),
        (
            "Judged by",
            f"the latest {counted(report['batches'], 'batch')} of process {report['process']}, {ahead} read ahead "
            "before the loop began",
        ),
        ("Processor time", f"{_ms(report['cpu_s'])} a batch, of all threads that made it"),
        (
            f"AU {percent(report['au'])}",
            f"Accelerator utilisation: the share of the time in which the devices computed{whose}.",
        ),
        (
            f"Wait share {percent(report['wait_share'])}",
            "The share of the time in which the devices were idle because the loop or its step waited for input.",
        ),
        (
            "Headroom",
            "How many times as fast as the training loop a stage would be if it worked alone. At 1 × or less, the "
            "stage makes the loop wait. The loop's own: how many times as fast it would be if it never waited.",
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds)} ms"
