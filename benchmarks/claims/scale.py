"""What does one process out of thousands do and send, and what of that grows with their number?

One process plans and reads for a mesh that need not exist. The messages of all are counted by running the
library's own code for each of them over a simulated coordination service, tests/simulated_service.py.

feedline claims that the time of a step does not grow, nor do the calls of a process to build a feed, for a window
of lanes, and for a check of replicas. Refuted if one of these grows between the smallest and the largest number of
processes: calls by more than a tenth, the time of a step by half. What grows by design is shown beside them: the
plan, which jax makes for the whole mesh, and the work of process 0, which stores the keys of all.

    python benchmarks/claims/scale.py --out scale.json     # 16 to 16,384 processes, some minutes
    python benchmarks/claims/scale.py --real 64            # and a small job of real processes on this machine
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from shared.script import parser, save
from simulated_service import Costs

from claims.scale_messages import messages
from claims.scale_plan import one_process
from claims.scale_real import real
from feedline._src.options import checked_integer

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


def main() -> None:
    """Measure, print and save."""
    asked = parser(__doc__)
    asked.add_argument("--processes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 16384])
    asked.add_argument("--rows", type=int, default=10**12, help="of the source")
    asked.add_argument("--repeats", type=int, default=3, help="how often the feed of one process is built")
    asked.add_argument("--latency-ms", type=float, default=0.5, help="of a call to the simulated service")
    asked.add_argument("--call-us", type=float, default=100, help="time of process 0 for each call")
    asked.add_argument(
        "--real", type=int, default=0, help="also start so many processes, each with one CPU device and 100 MiB"
    )
    options = asked.parse_args()
    costs = Costs(options.latency_ms / 1e3, options.call_us / 1e6)
    simulated = scale(options.processes, options.rows, costs, options.repeats, print)
    started = real(options.real) if options.real else None
    for line in real_lines(started) if started else ():
        print(line)
    save("scale", options, results={"simulated": simulated, "real": started})


if __name__ == "__main__":
    main()
