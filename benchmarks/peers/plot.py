"""Plots the result that `python benchmarks/peers/peers.py --out peers.json` saved: a bar chart for each row size.

    python benchmarks/peers/plot.py peers.json peers.svg

Of each library the fastest entrant is drawn. The axes are linear: a bar of twice the length is twice the rate.
Needs matplotlib, which `pip install '.[bench]'` in the clone brings.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

LIBRARIES = {
    "gather": "fastest gather alone",
    "limit": "np.take alone",
    "feedline": "feedline",
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
"""The library of each entrant."""
COLOURS = {"gather": "#9aa0a6", "limit": "#9aa0a6", "feedline": "#d1495b", "feedline_records": "#d1495b"}
OTHERS = "#30638e"
GLOBAL = 0.5
"""The least `jump` of a full shuffle, whose jump is about 1."""


def draw(result, path):
    """Save the picture of a result as a .png or .svg file."""
    matplotlib.rcParams["svg.hashsalt"] = "feedline"  # the same result gives the same bytes
    drawn(result).savefig(path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None)


def drawn(result):
    """A chart for each row size: bars are medians, lines reach from the slowest round to the fastest."""
    sizes = list(result["standings"])
    libraries = list(fastest(result, sizes[0]))  # in one order in all charts, so that the first names them for all
    libraries += [name for size in sizes for name in fastest(result, size) if name not in libraries]
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(libraries)), layout="constrained")
    charts = figure.subplots(1, len(sizes), squeeze=False, sharey=True)
    for chart, size in zip(charts[0], sizes, strict=True):
        _bars(chart, result, size, libraries)
    machine, plan = result["machine"], result["plan"]
    figure.suptitle("Shuffled rows onto 8 CPU devices, each library at its fastest", x=0.01, ha="left")
    where = [machine["processor"], f"{machine['cores']} cores", f"jax {machine['jax']}", machine.get("date")]
    missing = [name for name in result["failures"] if LIBRARIES.get(name, name) not in libraries]
    figure.supxlabel(
        f"{', '.join(filter(None, where))}; {plan['data_bytes'] / 2**30:g} GiB of rows, batches of"
        f" {plan['batch_bytes'] / 2**20:g} MiB\nBars: median of {plan['rounds']} rounds, with the "
        "slowest and the fastest round. Grey: only copies the rows, places nothing"
        + f"\nNot measured: {', '.join(missing)}"
        * bool(missing),
        x=0.01,
        ha="left",
        fontsize=8,
        color="#5a6b7f",
    )
    return figure


def fastest(result, size):
    """{library: its fastest entrant for a row size}, the fastest library first.

    Example:
      >>> entrants = {"tf_data_gather": 9, "feedline": 8, "tf_data_slices": 3}
      >>> found = {name: {"median_rows_per_s": rate} for name, rate in entrants.items()}
      >>> fastest({"standings": {"256": {"entrants": found}}}, "256")
      {'tf.data': 'tf_data_gather', 'feedline': 'feedline'}
    """
    found = result["standings"][size]["entrants"]
    best = {}
    for name in sorted(found, key=lambda name: -found[name]["median_rows_per_s"]):
        best.setdefault(LIBRARIES.get(name, name), name)
    return best


def _bars(chart, result, size, libraries):
    entrants, drawn = result["standings"][size]["entrants"], fastest(result, size)
    nearby = {check["entrant"] for check in result["checks"] if check["jump"] < GLOBAL}
    highest = max(sample["rows_per_s"] for sample in result["samples"] if sample["row_bytes"] == int(size)) / 1e6
    for at, library in enumerate(libraries):
        if library not in drawn:
            chart.text(0, at, " not measured", va="center", fontsize=9)
            continue
        name = drawn[library]
        rates = [
            sample["rows_per_s"] / 1e6
            for sample in result["samples"]
            if (sample["entrant"], sample["row_bytes"]) == (name, int(size))
        ]
        median = entrants[name]["median_rows_per_s"]
        chart.barh(at, median / 1e6, 0.7, color=COLOURS.get(name, OTHERS))
        chart.plot([min(rates), max(rates)], [at, at], color="black", linewidth=1.2, marker="|", markersize=5)
        label = _label(name, median, entrants[name]["feedline_over"]) + ", shuffles nearby rows" * (name in nearby)
        chart.text(max(rates) + highest / 50, at, label, va="center", fontsize=9)
    chart.set_yticks(range(len(libraries)), libraries)
    chart.set_ylim(len(libraries) - 0.5, -0.5)
    chart.set_xlim(0, 1.45 * highest)  # room for the words
    chart.set_xlabel("million rows per second", fontsize=9)
    chart.set_title(f"rows of {int(size):,} bytes", fontsize=10, loc="left")
    chart.tick_params(labelsize=9)
    chart.spines[["top", "right"]].set_visible(False)


def _label(name, rate, over):
    """The rate in words, and beside other loaders how much faster feedline is."""
    unit, word = next(((unit, word) for unit, word in ((1e6, " M"), (1e3, " k")) if rate >= unit), (1, ""))
    shown = f"{rate / unit:#.3g}".rstrip(".") + word
    if name in COLOURS or over is None:
        return shown
    return f"{shown}: feedline {over['ratio']:,.{0 if over['ratio'] >= 10 else 1}f} ×"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
