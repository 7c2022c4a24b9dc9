"""Plots the result that `python benchmarks/gpu.py --out gpu.json` saved.

    python benchmarks/plot_gpu.py gpu.json gpu.png

Needs matplotlib, which `pip install feedline[bench]` brings.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"pinned": "#9aa0a6", "staged": "#d1495b", "pageable": "#30638e", "registered": "#edae49"}


def draw(result, path):
    """Draw a panel for each question. The panel of a section without results stays empty."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    results = {name: found["results"] for name, found in result["sections"].items()}
    _transfer(panels[0, 0], results["transfer"] + results["registered"], result["machine"]["devices"])
    _overlap(panels[0, 1], results["overlap"])
    _utilisation(panels[1, 0], results["utilisation"])
    _feed(panels[1, 1], results["feed"])
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7)
        else:
            panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
    machine = result["machine"]
    judged = "" if machine["platform"] == "gpu" else "; not a GPU: nothing can be judged by it"
    figure.suptitle(
        f"{machine['devices']} × {machine['device_kind']}, {machine['processor']}, {machine['cores']} cores, "
        f"jax {machine['jax']}{judged}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _transfer(panel, results, devices):
    """Transfers of one leaf to all devices."""
    shown = [each for each in results if each.get("devices") == devices and each["leaves"] == 1]
    for memory, colour in COLOURS.items():
        found = sorted((e["mb"], e["bytes_per_s"][memory]) for e in shown if memory in e["bytes_per_s"])
        if found:
            sizes = [size for size, _ in found]
            panel.plot(sizes, [of["median"] / 1e9 for _, of in found], "o-", color=colour, label=memory)
            dots = [(size, sample / 1e9) for size, of in found for sample in of["samples"]]
            panel.plot(*zip(*dots, strict=True), ".", color=colour, markersize=3, alpha=0.5)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(bottom=0)
    panel.set(title="Host to all devices, one leaf", xlabel="MB a batch (logarithmic)", ylabel="GB/s")


def _overlap(panel, results):
    for ahead, marker in zip(sorted({each["ahead"] for each in results}), "os", strict=False):
        found = sorted(
            (e["prefetch"], e["share"]) for e in results if e["ahead"] == ahead and e["share"] is not None
        )
        if found:
            panel.plot(*zip(*found, strict=True), f"{marker}-", label=f"loop {ahead} steps ahead")
    _depths(panel, 0.95)
    panel.set(title="Transfers hidden under compute, in the trace", ylabel="share of their time")


def _utilisation(panel, results):
    for each in results:
        label = f"step {each['step_s'] / each['input_s']:.2f} × input, {each['ahead']} ahead"
        panel.plot(
            list(map(int, each["au"])), list(each["au"].values()), "s--" if each["ahead"] else "o-", label=label
        )
    _depths(panel, 0.99)
    panel.set(title="Accelerator utilisation", ylabel="step on resident data ÷ step with the feed")


def _depths(panel, threshold):
    panel.axhline(threshold, color="black", linewidth=0.8)
    panel.set_xticks(range(4))
    panel.set_ylim(0, max(1.05, panel.get_ylim()[1]))
    panel.set_xlabel(f"prefetch (line: {threshold})")


def _feed(panel, results):
    names = list(results[0]["entrants"]) if results else []
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * 0.8 / len(names) for k in range(len(results))]
        rates = [each["entrants"][name]["median"] * each["row_bytes"] / 1e9 for each in results]
        label, colour = (name, "#9aa0a6") if name in ("limit", "gather") else (f"{name} devices", None)
        panel.bar(at, rates, 0.8 / len(names), label=label, color=colour)
    panel.set_xticks(range(len(results)), [f"{each['row_bytes']} B" for each in results])
    panel.set(title="Feeds of shuffled rows, beside the memory limit", xlabel="size of a row", ylabel="GB/s")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
