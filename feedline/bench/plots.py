"""Plots saved results of `feedline bench`. Separate from measuring, so that a result can be plotted again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedline.bench.modes import side_by_side

_LIMITS = ("limit", "gather")


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the saved result of one benchmark as a .png or .svg file.

    Raises:
      ModuleNotFoundError: matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'feedline[bench]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    _DRAW[result["benchmark"]](axes, result.get("results", result))
    machine = result["machine"]
    subtitle = f"{machine['processor']}, {machine['cores']} cores, jax {machine['jax']}"
    figure.axes[-1].set_title(subtitle, loc="right", size=7)
    axes.set_title(axes.get_title(), loc="left")
    axes.set_title("")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _draw_feed(axes: Any, results: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Each kind of feed, and the fastest gather, as a share of `np.take`. Or the stages of a user's feed."""
    if isinstance(results, dict):
        stages = ("read_s", "transform_s", "place_s", "wait_s")
        axes.barh([stage.removesuffix("_s") for stage in stages], [results[stage] * 1e3 for stage in stages])
        axes.set(xlabel="milliseconds a batch", title=f"{results['rows_per_s']:,.0f} rows/s")
        return
    names = [name for name in results[0]["entrants"] if name not in _LIMITS]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        entrants = [result["entrants"][name] for result in results]
        shares = [each["of_limit"] for each in entrants]
        errors = [
            [abs(each["of_limit_interval"][side] - each["of_limit"]) for each in entrants] for side in (0, 1)
        ]
        at = [k + (i - (len(names) - 1) / 2) * width for k in range(len(results))]
        axes.bar(at, shares, width, yerr=errors, label=f"{name} device{'s' * (not name.endswith(' 1'))}")
    axes.axhline(1, color="black", linewidth=0.8, label="np.take alone")
    gathers = [result["entrants"]["gather"]["of_limit"] for result in results]
    lefts, rights = zip(*((k - 0.45, k + 0.45) for k in range(len(results))), strict=True)
    axes.hlines(gathers, lefts, rights, color="black", linestyle="dashed", label="fastest gather alone")
    axes.set_xticks(
        range(len(results)),
        [f"{_size(result['row_bytes'])} rows\n{result['batch_bytes'] / 1e6:g} MB" for result in results],
    )
    axes.set(
        ylabel="share of np.take",
        ylim=(0, max(1.25, *gathers) * 1.15),
        title="Shuffled rows to the mesh, beside copying alone",
    )
    axes.legend(loc="upper left", ncols=3, fontsize=8)


def _draw_order(axes: Any, results: list[dict[str, Any]]) -> None:
    for shuffle in ("full", "blocked"):
        for batch in sorted({each["batch"] for each in results}):
            cases = [x for x in results if (x["shuffle"], x["batch"], x["threads"]) == (shuffle, batch, 1)]
            style = "-" if shuffle == "full" else "--"
            axes.plot(
                [x["rows"] for x in cases],
                [x["median_cpu_ns"] for x in cases],
                style,
                label=f"{shuffle}, {batch:,}",
            )
    axes.set(
        xlabel="rows in the source", ylabel="ns of a core for a row", title="Cost of the order", ylim=(0, None)
    )
    axes.legend(title="shuffle, positions a call", ncols=2)


def _draw_place(axes: Any, results: dict[str, Any]) -> None:
    cases = results["placing"]
    names = [f"{each['leaves']} leaves, {each['devices']} devices" for each in cases[::2]]
    for i, memory in enumerate(("aligned", "misaligned")):
        axes.barh([k + (i - 0.5) * 0.4 for k in range(len(names))], [x["place_s"] * 1e6 for x in cases[i::2]], 0.4)
        axes.patches[-1].set_label(memory)
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel="microseconds to place a batch", title="Placing a batch from host memory")
    axes.legend(["aligned", "misaligned: copied by the CPU backend"])


def _draw_overlap(axes: Any, results: dict[str, Any]) -> None:
    depths = results["depths"]
    axes.bar([str(depth["prefetch"]) for depth in depths], [depth["of_the_slower"] for depth in depths])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        xlabel="prefetch", ylabel="step ÷ the slower of load and compute", title="Overlap of load and compute"
    )


def _draw_resume(axes: Any, results: list[dict[str, Any]]) -> None:
    names = [f"{each['position']:,}" for each in results]
    axes.bar(names, [each["restore_s"] * 1e3 for each in results], label="set_state")
    axes.bar(
        names,
        [each["first_batch_s"] * 1e3 for each in results],
        bottom=[each["restore_s"] * 1e3 for each in results],
        label="the first batch",
    )
    axes.set(xlabel="position restored", ylabel="milliseconds", title="Resuming in 10¹⁵ rows")
    axes.legend()


def _draw_modes(axes: Any, results: dict[str, Any]) -> None:
    """Step times as bars; beside them how the first kernel and a batch lie on the devices in each mode."""
    modes: dict[str, Any] = results["modes"]
    ran = {mode: found for mode, found in modes.items() if "step_ms" in found}
    for i, (name, label) in enumerate((("step_ms", "on a resident batch"), ("fed_step_ms", "fed"))):
        at = [k + (i - 0.5) * 0.4 for k in range(len(ran))]
        axes.bar(at, [found[name] for found in ran.values()], 0.4, label=label)
    axes.set_xticks(range(len(ran)), list(ran))
    highest = max((max(found["step_ms"], found["fed_step_ms"]) for found in ran.values()), default=1)
    axes.set(ylabel="milliseconds a step", title="A step in each mode", ylim=(0, 1.3 * highest))
    axes.legend(loc="upper left", ncols=2)
    grid = axes.figure.add_gridspec(1, 2, width_ratios=(1.4, 1))
    axes.set_subplotspec(grid[0])
    beside = axes.figure.add_subplot(grid[1])
    beside.axis("off")
    drawn = [
        f"{mode}\n{side_by_side(found['shardings'])}\n" for mode, found in modes.items() if "shardings" in found
    ]
    beside.text(0, 1, "\n".join(drawn), family="monospace", size=5.5, linespacing=1, va="top")


def _draw_scale(axes: Any, results: dict[str, Any]) -> None:
    """On the left the calls of a process to the coordination service; on the right what a process does alone."""
    found = results["simulated"]
    numbers = [each["processes"] for each in found]
    for case in found[0]["messages"]:
        there = [each for each in found if case in each["messages"]]
        axes.plot(
            [each["processes"] for each in there],
            [each["messages"][case]["calls"] for each in there],
            ".-",
            label=case,
        )
    axes.set(xscale="log", xlabel="processes", ylabel="calls a process", title="What grows with the processes")
    axes.set_ylim(0, None)
    axes.legend(fontsize=7)
    grid = axes.figure.add_gridspec(1, 2)
    axes.set_subplotspec(grid[0])
    beside = axes.figure.add_subplot(grid[1])
    for name, label, factor in (
        ("step_cpu_s", "a step, µs", 1e6),
        ("build_cpu_s", "to build, ms", 1e3),
        ("describe_cpu_s", "to describe, ms", 1e3),
        ("heap_bytes", "memory, MiB", 1 / 2**20),
    ):
        beside.plot(numbers, [each["process"][name] * factor for each in found], ".-", label=label)
    beside.set(xscale="log", yscale="log", xlabel="processes")
    beside.legend(fontsize=7, title="one process alone", title_fontsize=7)


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.0f} KB"


_DRAW: dict[str, Callable[[Any, Any], None]] = {
    "feed": _draw_feed,
    "order": _draw_order,
    "place": _draw_place,
    "overlap": _draw_overlap,
    "resume": _draw_resume,
    "modes": _draw_modes,
    "scale": _draw_scale,
}
