"""Plots the result that `python benchmarks/peers.py --out peers.json` saved: a bar chart for each row size.

    python benchmarks/plot_peers.py peers.json peers.svg

Needs matplotlib, which `pip install feedline[bench]` brings.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"limit": "#9aa0a6", "gather": "#9aa0a6", "feedline": "#d1495b", "feedline_records": "#d1495b"}
OTHERS = "#30638e"
GLOBAL = 0.5
"""The least `jump` of a full shuffle, whose jump is about 1."""
LABELS = {
    "limit": "np.take alone",
    "gather": "fastest gather alone",
    "feedline_records": "feedline, record by record",
    "numpy": "NumPy and placement",
    "grain_batches": "Grain, whole batches",
    "grain_records": "Grain, per record",
    "grain_records_best": "Grain, per record, tuned",
    "spdl": "SPDL, vectorised",
    "jax_dataloader": "jax-dataloader",
    "torch_batched": "PyTorch, vectorised",
    "torch_usual": "PyTorch, as usually written",
    "tf_data_gather": "tf.data, one gather a batch",
    "tf_data_slices": "tf.data, slices",
    "mosaic_streaming": "MosaicML Streaming",
    "litdata": "LitData",
}
"""The label of each entrant in a chart."""


def draw(result, path):
    """Draw a chart for each row size, fastest on top: bars are medians, dots are rounds."""
    sizes = list(result["standings"])
    bars = max(len(result["standings"][size]["entrants"]) for size in sizes)
    figure, charts = plt.subplots(
        1, len(sizes), figsize=(6.5 * len(sizes), 1.6 + 0.34 * bars), squeeze=False, layout="constrained"
    )
    for chart, size in zip(charts[0], sizes, strict=True):
        _bars(chart, result, int(size))
    machine, plan = result["machine"], result["plan"]
    missing = ", ".join(LABELS.get(name, name) for name in result["failures"])
    figure.suptitle(
        f"Rows per second onto 8 CPU devices, from {plan['data_bytes'] / 2**30:g} GiB in memory or on the local "
        f"disk, shuffled, batches of {plan['batch_bytes'] / 2**20:g} MiB\n"
        f"{machine['processor']}, {machine['cores']} cores; median of {plan['rounds']} rounds, dots: each round"
        + (f"; not measured: {missing}" if missing else ""),
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _bars(chart, result, size):
    found = result["standings"][str(size)]["entrants"]
    names = list(found)
    locally = {c["entrant"] for c in result["checks"] if c["row_bytes"] == size and c["jump"] < GLOBAL}
    medians = [found[name]["median_rows_per_s"] for name in names]
    labels = [LABELS.get(name, name) + "\n(shuffles nearby rows)" * (name in locally) for name in names]
    chart.barh(range(len(names)), medians, color=[COLOURS.get(name, OTHERS) for name in names], height=0.7)
    for sample in result["samples"]:
        if sample["row_bytes"] == size:
            chart.plot(sample["rows_per_s"], names.index(sample["entrant"]), ".", color="black", markersize=3)
    highest = {
        name: max(s["rows_per_s"] for s in result["samples"] if (s["entrant"], s["row_bytes"]) == (name, size))
        for name in names
    }
    for i, (name, median) in enumerate(zip(names, medians, strict=True)):
        chart.text(highest[name] * 1.15, i, _millions(median), va="center", fontsize=8)
    chart.set_yticks(range(len(names)), labels, fontsize=9)
    chart.set_xscale("log")
    chart.set_xlim(min(medians) / 3, max(medians) * 4)
    chart.invert_yaxis()
    chart.set_xlabel("rows per second (logarithmic)")
    chart.set_title(f"rows of {size} bytes", fontsize=10)
    chart.spines[["top", "right"]].set_visible(False)
    chart.grid(axis="x", alpha=0.3)
    chart.set_axisbelow(True)


def _millions(rate):
    return f"{rate / 1e6:.3g} M"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
