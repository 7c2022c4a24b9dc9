"""Plots the result that `python benchmarks/gpu/gpu.py --out gpu.json` saved.

    python benchmarks/gpu/plot.py gpu.json gpu.png

Needs matplotlib, which `pip install '.[bench]'` in the clone brings.
"""

import functools
import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {
    "pinned": "#9aa0a6",
    "staged": "#d1495b",
    "pageable": "#30638e",
    "registered": "#edae49",
    "dlpack": "#66a182",
}


def draw(result, path):
    """Draw a panel for each question. The first four stay empty without results, the others are left out."""
    results = {name: found["results"] for name, found in result["sections"].items()}
    devices = result["machine"]["devices"]
    sent = [each for part in ("transfer", "registered", "pinned") for each in results.get(part, [])]
    drawn = [
        lambda panel: _transfer(panel, sent, devices),
        lambda panel: _overlap(panel, results.get("overlap", [])),
        lambda panel: _utilisation(panel, results.get("utilisation", [])),
        lambda panel: _feed(panel, results.get("feed", [])),
    ]
    for name, draw_part in (("modes", _modes), ("practices", _practices), ("memory", _memory)):
        if results.get(name):
            drawn.append(functools.partial(draw_part, results=results[name]))
    lines = -(-len(drawn) // 2)
    figure, panels = plt.subplots(lines, 2, figsize=(12, 4 * lines), layout="constrained")
    for panel, draw_part in itertools.zip_longest(panels.flat, drawn):
        _panel(panel, draw_part)
    machine = result["machine"]
    judged = "" if machine["platform"] == "gpu" else "; not a GPU: nothing can be judged by it"
    figure.suptitle(
        f"{machine['devices']} × {machine['device_kind']}, {machine['processor']}, {machine['cores']} cores, "
        f"jax {machine['jax']}{judged}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(panel, draw_part):
    if draw_part is None:
        panel.set_axis_off()
        return
    draw_part(panel)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=7)
    else:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)


def _transfer(panel, results, devices):
    """Transfers of one leaf to all devices."""
    shown = [each for each in results if each.get("devices") == devices and each["leaves"] == 1]
    for memory, colour in COLOURS.items():
        found = [(e["mb"], e["bytes_per_s"][memory]) for e in shown if memory in e["bytes_per_s"]]
        found.sort(key=lambda each: each[0])  # several parts measure the limit
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


def _modes(panel, results):
    """The step as a share of the rate of matrix products: float32 in each mode, and bfloat16."""
    shares = [(f"{e['mode']}\nfloat32", e["of_matmul"]) for e in results if "of_matmul" in e and "mode" in e]
    shares += [(f"jit_multi\n{e['compute']}", e["of_matmul"]) for e in results if "compute" in e]
    names = [name for name, _ in shares]
    panel.bar(names, [share for _, share in shares], 0.6, color="#30638e", label="step on a resident batch")
    panel.axhline(0.6, color="black", linewidth=0.8)
    panel.set(title="MLP step ÷ matrix products in its dtype (line: 0.6, for bfloat16)", ylabel="share")
    panel.tick_params(axis="x", labelsize=8)


def _practices(panel, results):
    names = [f"{each['case']} ({each['workload']})" for each in results]
    at = range(len(results))
    panel.barh(at, [each["ratio"] for each in results], 0.6, color="#30638e", label="median")
    dots = [(ratio, i) for i, each in enumerate(results) for ratio in each["ratios"]]
    panel.plot(*zip(*dots, strict=True), "k.", markersize=3, label="round")
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(at, names, fontsize=7)
    panel.invert_yaxis()
    panel.set(title="Time of a step with each practice", xlabel="on ÷ off")


def _memory(panel, results):
    (found,) = results[:1]
    held = found["held"]
    shown = {
        "host, resident": [shot["host_bytes"] for shot in held.values()],
        "first device, live": [shot["device_bytes"][0] for shot in held.values()],
        "first device, peak": [shot["peak_bytes"][0] for shot in held.values()],
    }
    for i, (name, sizes) in enumerate(shown.items()):
        if None not in sizes:  # a CPU counts no peak
            panel.bar([k + (i - 1) * 0.27 for k in range(3)], [size / 2**20 for size in sizes], 0.27, label=name)
    panel.set_xticks(range(3), [f"{when}: step {shot['step']:,}" for when, shot in held.items()])
    panel.set_yscale("symlog", linthresh=1)
    growths = len(found["growths"])
    panel.set(title=f"Memory in {found['steps']:,} steps: {growths} kinds grow", ylabel="MiB (logarithmic)")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
