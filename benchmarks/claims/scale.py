"""What does one process out of thousands do and send, and what grows with the number of processes?

One process plans and reads for a mesh that need not exist. The messages of all processes are counted: the
library's own code runs for each process over a simulated coordination service, tests/simulated_service.py.

feedline claims that neither the time of a step grows, nor the number of calls that a process makes to build a
feed, for a window of lanes, or for a check of replicas. Refuted if, from the smallest to the largest number of
processes, calls grow by more than a tenth, or the time of a step by more than half. Also shown is what grows by
design: the plan, which jax makes for the whole mesh, and the work of process 0, which stores all keys.

    python benchmarks/claims/scale.py --out scale.json     # 16 to 16,384 processes, some minutes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from shared.script import parser, save
from simulated_service import Costs

from claims.scale_messages import messages
from claims.scale_plan import one_process

FLAT = ("build", "build, one differs", "window of lanes", "check of replicas", "times for the report")
"""Cases whose calls must not grow. Cases with a late process are left out: meanwhile, the others ask again."""


def scale(processes: Sequence[int], rows: int, costs: Costs, repeats: int) -> list[dict[str, Any]]:
    """Plan, read and agree for each number of processes, and print what each case takes.

    Returns:
      for each number {"processes", "process": see `one_process`, "messages": see `messages`}.
    """
    if any(count < 2 or count % 2 for count in processes):
        raise ValueError(f"--processes takes even numbers from 2 on, because pairs share rows, got {processes}")
    found: list[dict[str, Any]] = []
    for count in processes:
        alone, description = one_process(rows, count, repeats)
        times = {name: round(alone[f"{name}_cpu_s"] * 1e6) for name in ("build", "describe", "step")}
        print(f"{count:>9,}: CPU µs {times}, heap {alone['heap_bytes'] / 2**20:.2f} MiB")
        found.append({"processes": count, "process": alone, "messages": messages(count, description, costs)})
    for case in found[0]["messages"]:
        for each in (each for each in found if case in each["messages"]):
            figures = {name: round(value, 3) for name, value in each["messages"][case].items()}
            print(f"{case:26} {each['processes']:>9,}: {figures}")
    grown = growth(found[0], found[-1])
    print(f"refuted: {'; '.join(grown)}" if grown else "not refuted")
    return found


def growth(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """What grows with the number of processes, although it must not."""
    calls = {case: [each["messages"][case]["calls"] for each in (first, last)] for case in FLAT}
    grown = [f"{case}: {few:.2f} to {many:.2f} calls" for case, (few, many) in calls.items() if many > 1.1 * few]
    few, many = (each["process"]["step_cpu_s"] * 1e6 for each in (first, last))
    return [*grown, f"a step: {few:.0f} to {many:.0f} µs"] if many > 1.5 * few else grown


def main() -> None:
    """Measure, print and save."""
    asked = parser(__doc__)
    asked.add_argument("--processes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 16384])
    asked.add_argument("--rows", type=int, default=10**12, help="of the source")
    asked.add_argument("--repeats", type=int, default=3, help="how often the feed of one process is built")
    asked.add_argument("--latency-ms", type=float, default=0.5, help="of a call to the simulated service")
    asked.add_argument("--call-us", type=float, default=100, help="time of process 0 for each call")
    options = asked.parse_args()
    costs = Costs(options.latency_ms / 1e3, options.call_us / 1e6)
    simulated = scale(options.processes, options.rows, costs, options.repeats)
    save("scale", options, results={"simulated": simulated})


if __name__ == "__main__":
    main()
