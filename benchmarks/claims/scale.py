"""What grows with the number of processes, from tens to thousands?

feedline claims that the time of a step does not grow, nor do the calls of a process to build a feed, for a window
of lanes, and for a check of replicas. Refuted if one of these grows between the smallest and the largest number of
processes: calls by more than a tenth, the time of a step by half. What grows by design is shown beside them: the
plan, which jax makes for the whole mesh, and the work of process 0, which stores the keys of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from feedline._src.options import checked_integer
from feedline._src.tools.bench.scale.messages import messages
from feedline._src.tools.bench.scale.plan import one_process
from feedline._src.tools.bench.scale.service import Costs

FLAT = ("build", "build, one differs", "window of lanes", "check of replicas", "times for the report")
"""Cases whose calls must not grow. While a process is late, the others ask again."""
_MOST_GROWTH = {"calls": 1.1, "step": 1.5}
_US, _MS, _MIB = 1e6, 1e3, 1 / 2**20


def scale(
    processes: Sequence[int], rows: int, costs: Costs, repeats: int, print_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Plan, read and agree for each number of processes.

    Args:
      rows: of the source.
      costs: of the simulated service.
      repeats: how often the feed of one process is built and read.
      print_line: called with each line of the tables.

    Returns:
      for each number {"processes", "process": see `one_process`, "messages": see `messages`}.

    Raises:
      ValueError: a number is odd, so that pairs cannot share rows, or there are too few rows.
    """
    for count in processes:
        if checked_integer("--processes", count, at_least=2) % 2:
            raise ValueError(
                f"--processes takes even numbers, because pairs share rows, got {count}; use {count + 1}"
            )
    print_line("one process of so many, alone")
    print_line(f"{'processes':>9} {'build ms':>9} {'describe ms':>12} {'step µs':>8} {'heap MiB':>9}  CPU time")
    found: list[dict[str, Any]] = []
    for count in processes:
        alone, description = one_process(rows, count, repeats)
        print_line(
            f"{count:>9,} {alone['build_cpu_s'] * _MS:>9.1f} {alone['describe_cpu_s'] * _MS:>12.1f} "
            f"{alone['step_cpu_s'] * _US:>8.1f} {alone['heap_bytes'] * _MIB:>9.2f}"
        )
        found.append({"processes": count, "process": alone, "messages": messages(count, description, costs)})
    print_line("")
    print_line("messages of all, by the library's code over a simulated service")
    print_line(
        f"{'':26} {'processes':>9} {'calls':>6} {'most':>6} {'bytes':>9} {'most':>11} {'all calls':>10} {'s':>7}"
    )
    for case in found[0]["messages"]:
        for each in found:
            if case in each["messages"]:
                print_line(_line(case, each["processes"], each["messages"][case]))
    grown = growth(found)
    print_line(f"refuted: {'; '.join(grown)}" if grown else "not refuted")
    return found


def growth(found: Sequence[dict[str, Any]]) -> list[str]:
    """What grows with the processes, though it must not."""
    first, last = found[0], found[-1]
    grown = [
        f"{case}: from {before:.2f} to {after:.2f} calls a process"
        for case in FLAT
        for before, after in [(first["messages"][case]["calls"], last["messages"][case]["calls"])]
        if after > _MOST_GROWTH["calls"] * before
    ]
    before, after = (each["process"]["step_cpu_s"] for each in (first, last))
    if after > _MOST_GROWTH["step"] * before:
        grown.append(f"a step: from {before * _US:.0f} to {after * _US:.0f} µs")
    return grown


def _line(case: str, processes: int, figures: dict[str, float]) -> str:
    calls = f"{case:26} {processes:>9,} {figures['calls']:>6.2f} {figures['most_calls']:>6.1f}"
    carried = f"{figures['bytes']:>9,.0f} {figures['most_bytes']:>11,.0f}"
    return f"{calls} {carried} {figures['all_calls']:>10,.0f} {figures['seconds']:>7.3f}"


def real_lines(found: dict[str, Any]) -> list[str]:
    """What real processes on this machine needed, in words."""
    private, shared, resident = (f"{found['memory_bytes'][kind] * _MIB:.0f}" for kind in ("Private", "Pss", "Rss"))
    return [
        "",
        f"{found['processes']} real processes on this machine, seconds since the launch: median, last",
        *(
            f"{name.removesuffix('_s').replace('_', ' '):>12} {found[name][0]:8.1f} {found[name][1]:8.1f}"
            for name in ("imported_s", "joined_s", "mesh_s", "first_batch_s", "done_s")
        ),
        f"{'ended':>12} {'':8} {found['ended_s']:8.1f}",
        f"MiB of each: {private} private, {shared} with its part of common pages, {resident} resident",
        f"calls until the first batch: {min(found['build_calls'])}, at most {max(found['build_calls'])}",
        f"calls of a feed of lanes with {found['windows']} windows: {found['lanes_calls']:.1f}",
    ]
