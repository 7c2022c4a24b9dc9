"""Plots the saved result of peers.py, scale.py or one_curve.py.

    python benchmarks/plot.py result.json picture.svg

Needs matplotlib, which `pip install '.[bench]'` in the clone brings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_LIMITS = ("limit", "gather")
_BLUE, _RED, _GREY = "#30638e", "#d1495b", "#9aa0a6"  # red: with feedline; grey: places nothing
_LIBRARIES = {
    "gather": "fastest gather alone",
    "limit": "np.take alone",
    "feedline_records": "feedline",
    "numpy": "NumPy and placement",
    "grain_batches": "Grain",
    "grain_records": "Grain",
    "grain_records_best": "Grain",
    "spdl": "SPDL",
    "jax_dataloader": "jax-dataloader",
    "torch_batched": "PyTorch DataLoader",
    "torch_usual": "PyTorch DataLoader",
    "tf_data_gather": "tf.data",
    "tf_data_slices": "tf.data",
    "mosaic_streaming": "MosaicML Streaming",
    "litdata": "LitData",
}
"""{entrant of peers.py: its library}. Other entrants are shown by their own names."""
_FULL_SHUFFLE = 0.5
"""The least `jump` of a full shuffle, whose jump is about 1."""


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the saved result of one benchmark as a .png or .svg file."""
    matplotlib.use("agg")
    figure = drawn(result)
    matplotlib.rcParams["svg.hashsalt"] = "feedline"  # the same result gives the same bytes
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def drawn(result: dict[str, Any]) -> Any:
    """Draw the saved result of one benchmark. Returns a matplotlib figure, 9 inches wide."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    title, note = _DRAW[result["benchmark"]](figure, result.get("results", result))
    machine = result["machine"]
    where = [machine["processor"], f"{machine['cores']} cores", f"jax {machine['jax']}", machine.get("date")]
    figure.suptitle(title, x=0.01, ha="left")
    caption = "; ".join(filter(None, [", ".join(filter(None, where)), note]))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#5a6b7f")
    return figure


def _draw_scale(figure: Any, results: dict[str, Any]) -> tuple[str, str]:
    """On the left, the calls of a process to the coordination service; on the right, what a process does alone."""
    found = results["simulated"]
    numbers = [each["processes"] for each in found]
    panels = figure.subplot_mosaic([["calls", "times"], ["calls", "memory"]], width_ratios=(1.2, 1), sharex=True)
    for i, case in enumerate(found[0]["messages"]):
        there = [each for each in found if case in each["messages"]]
        panels["calls"].plot(
            [each["processes"] for each in there],
            [each["messages"][case]["calls"] for each in there],
            marker="osv^D*x"[i % 7],
            linestyle="--" if "," in case else "-",  # a variant of another case, whose line may coincide
            fillstyle="none",
            label=case,
        )
    panels["calls"].set(ylabel="calls", xlabel="processes", ylim=(0, None), xscale="log")
    panels["calls"].set_title("calls of a process to the coordination service", size=10, loc="left")
    panels["calls"].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.85))
    alone = [each["process"] for each in found]
    for name, label in (("build", "build a feed"), ("describe", "of it, describe it"), ("step", "a step")):
        medians = [each[f"{name}_cpu_s"] * 1e3 for each in alone]
        panels["times"].plot(numbers, medians, ".-", label=label)
    panels["times"].set(ylabel="CPU milliseconds", yscale="log")
    panels["times"].yaxis.set_major_formatter("{x:g}")
    panels["times"].set_title("one process alone", size=10, loc="left")
    panels["times"].legend(fontsize=8)
    panels["memory"].plot(numbers, [each["heap_bytes"] / 2**20 for each in alone], ".-")
    panels["memory"].set(ylabel="MiB of heap", xlabel="processes", yscale="log")
    panels["memory"].yaxis.set_major_formatter("{x:g}")
    for panel in panels.values():
        panel.set_xticks(numbers, [f"{count:,}" for count in numbers], fontsize=8)
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    return "What grows with the processes", "times: medians"


def _draw_one_curve(figure: Any, results: dict[str, Any]) -> tuple[str, str]:
    """Above, the loss of each step; below, the steps that each number of processes did before the kill."""
    loss, runs = figure.subplots(2, height_ratios=(3, 1), sharex=True)
    whole = results["whole"]
    loss.plot(
        *_by_step(whole), color="#d5d8dc", linewidth=7, solid_capstyle="round", label="never stopped, 1 process"
    )
    colours = (_BLUE, "#00a19a", "#c0780c", _RED)
    for at, ((count, losses), colour) in enumerate(zip(results["parts"].items(), colours, strict=True)):
        steps, values = _by_step(losses)
        name = f"{count} process{'es' * (count != '1')}"
        loss.plot(steps, values, color=colour, linewidth=1.6)
        runs.barh(at, steps[-1] - steps[0] + 1, 0.62, steps[0] - 0.5, color=colour)
        runs.text(steps[0] + 1, at, name, color="white", fontsize=8, va="center")
        if at < len(colours) - 1:
            loss.plot(steps[-1], values[-1], "x", color="black", markersize=8, markeredgewidth=2)
            runs.text(steps[-1] + 2, at, "× kill -9", fontsize=8, va="center")
    loss.plot([], [], "x", color="black", markersize=8, markeredgewidth=2, label="kill -9 of one process")
    loss.set(ylabel="loss", ylim=(0, None))
    loss.legend(fontsize=9)
    runs.set(xlabel="step", yticks=[], ylim=(len(colours) - 0.5, -0.5), xlim=(-1, len(whole) + 2))
    for axes in (loss, runs):
        axes.spines[["top", "right"]].set_visible(False)
    counts = [int(count) for count in results["parts"]]
    return (
        f"One run on {', '.join(map(str, counts[:-1]))} and {counts[-1]} processes, with kills in between",
        f"largest relative difference of a loss: {results['largest_difference']:.0e}",
    )


def _by_step(losses: dict[str, float]) -> tuple[list[int], list[float]]:
    return [int(step) for step in losses], list(losses.values())


def _draw_peers(figure: Any, result: dict[str, Any]) -> tuple[str, str]:
    """A chart for each row size, with the fastest entrant of each library, and lines to its extreme rounds."""
    sizes, plan = list(result["standings"]), result["plan"]
    # in the same order in all charts
    libraries = list(dict.fromkeys(name for size in sizes for name in fastest(result, size)))
    figure.set_size_inches(9, 1.5 + 0.3 * len(libraries))
    charts = figure.subplots(1, len(sizes), squeeze=False, sharey=True)
    for chart, size in zip(charts[0], sizes, strict=True):
        _bars(chart, result, size, libraries)
    missing = [name for name in result["failures"] if _LIBRARIES.get(name, name) not in libraries]
    return (
        "Shuffled rows onto 8 CPU devices, each library at its fastest",
        f"{plan['data_bytes'] / 2**30:g} GiB of rows, batches of {plan['batch_bytes'] / 2**20:g} MiB\n"
        f"Bars: median of {plan['rounds']} rounds, with the slowest and the fastest round. "
        "Grey: only copies the rows, places nothing" + f"\nNot measured: {', '.join(missing)}" * bool(missing),
    )


def fastest(result: dict[str, Any], size: str) -> dict[str, str]:
    """{library: its fastest entrant for a row size}, the fastest library first."""
    found, best = result["standings"][size]["entrants"], dict[str, str]()
    for name in sorted(found, key=lambda name: -found[name]["median_rows_per_s"]):
        best.setdefault(_LIBRARIES.get(name, name), name)
    return best


def _bars(chart: Any, result: dict[str, Any], size: str, libraries: list[str]) -> None:
    entrants, names = result["standings"][size]["entrants"], fastest(result, size)
    nearby = {check["entrant"] for check in result["checks"] if check["jump"] < _FULL_SHUFFLE}
    rates: dict[str, list[float]] = {}
    for sample in result["samples"]:
        if sample["row_bytes"] == int(size):
            rates.setdefault(sample["entrant"], []).append(sample["rows_per_s"] / 1e6)
    highest = max(max(of) for of in rates.values())
    for at, library in enumerate(libraries):
        if library not in names:
            chart.text(0, at, " not measured", va="center", fontsize=9)
            continue
        name, found = names[library], entrants[names[library]]
        colour = _RED if library == "feedline" else _GREY if name in _LIMITS else _BLUE
        chart.barh(at, found["median_rows_per_s"] / 1e6, 0.7, color=colour)
        ends = [min(rates[name]), max(rates[name])]
        chart.plot(ends, [at, at], color="black", linewidth=1.2, marker="|", markersize=5)
        label = _rate(found["median_rows_per_s"])
        if colour == _BLUE and (over := found["feedline_over"]) is not None:
            label += f": feedline {over['ratio']:,.{0 if over['ratio'] >= 10 else 1}f} ×"
        label += ", shuffles nearby rows" * (name in nearby)
        chart.text(ends[1] + highest / 50, at, label, va="center", fontsize=9)
    chart.set_yticks(range(len(libraries)), libraries)
    chart.set_ylim(len(libraries) - 0.5, -0.5)
    chart.set_xlim(0, 1.45 * highest)  # room for the labels
    chart.set_xlabel("million rows per second", fontsize=9)
    chart.set_title(f"rows of {int(size):,} bytes", fontsize=10, loc="left")
    chart.tick_params(labelsize=9)
    chart.spines[["top", "right"]].set_visible(False)


def _rate(rows_per_s: float) -> str:
    unit, word = next(((unit, word) for unit, word in ((1e6, " M"), (1e3, " k")) if rows_per_s >= unit), (1, ""))
    return f"{rows_per_s / unit:#.3g}".rstrip(".") + word


_DRAW: dict[str, Callable[[Any, Any], tuple[str, str]]] = {
    "one_curve": _draw_one_curve,
    "scale": _draw_scale,
    "peers": _draw_peers,
}
"""Each draws a result on an empty figure. Returns the title, and what the caption says after the machine."""


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
