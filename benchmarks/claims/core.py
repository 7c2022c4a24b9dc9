"""How close is a feed of columns to only copying the rows, and what does it cost the training thread?

Prints all figures for columns in one table, in a few minutes on two cores. Each is the median of several rounds:

- *feeds*: feed ÷ `np.take` and feed ÷ the fastest gather known, both with as many threads as the feed reads with,
  in an order that was computed before; and core-seconds a GB, which is the CPU time of the process ÷ bytes.
- *thread*: microseconds of the training thread in `next(feed)`, and in releasing the previous batch (`del`). The
  thread sleeps between two batches, as if it waited for accelerators.
- *order*: nanoseconds of one core for each position; the slowest of sources with 10^6 to 10^15 rows.
- *memory* (only if named): 100,000 batches; growth of resident memory, and host buffers mapped after the first 20.
- `--peers FILE`: feed ÷ the fastest other loader, from the result that `peers.py --out FILE` saved.

    python benchmarks/core.py --json --out core.json
    python benchmarks/core.py --parts memory
    PYTHONPATH=/another/tree python benchmarks/core.py      # another version of feedline

Refuted by a figure that misses its aim on an idle machine; the table shows the aims.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from core_feeds import BATCH_MB, feeds, thread

import feedline
from feedline._src.tools.bench.feed import filler
from feedline._src.tools.bench.machine import describe

POSITIONS = (8192, 65_536)
PARTS = ("feeds", "thread", "order")


def order(repeats):
    """{"C" or "NumPy": {positions in a call: ns a row}}, each measured in a process of its own."""
    found = {}
    for pure in ("0", "1"):
        # -P: import the feedline that is measured, not one in the current folder
        command = [sys.executable, "-P", "-m", "feedline", "bench", "order", "--json", "--repeats", str(repeats)]
        result = json.loads(output(command, FEEDLINE_PURE_PYTHON=pure).splitlines()[-1])
        costs = [each for each in result["results"] if each["shuffle"] == "full" and each["threads"] == 1]
        found[result["machine"].get("columns", "NumPy")] = {
            str(count): max(each["median_cpu_ns"] for each in costs if each["batch"] == count)
            for count in POSITIONS
        }
    return found


def memory(batches):
    """Growth of resident memory, and host buffers mapped, after the first 20 batches."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "memory.json"
        output([sys.executable, Path(__file__).with_name("memory.py"), "--batches", str(batches), "--out", saved])
        plain = json.loads(saved.read_text())["results"][0]
    return {
        "batches": batches,
        "growth_mib_after_20": plain["growth_bytes_after_20"] / 2**20,
        "growth_mib_after_2000": plain["growth_bytes"] / 2**20,
        "new_slabs_after_20": plain["slabs_at_the_end"] - plain["slabs_after_20"],
    }


def output(command, **environment):
    """The standard output of a command. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def best_peer(result):
    """{row_bytes: {"peer", "feed_of_peer"}}: the fastest loader other than feedline."""
    ours = ("limit", "gather", "feedline", "feedline_records")
    found = {}
    for size, standings in result["standings"].items():
        peer, standing = next(
            (name, entrant) for name, entrant in standings["entrants"].items() if name not in ours
        )
        found[size] = {"peer": peer, "feed_of_peer": standing["feedline_over"]["ratio"]}
    return found


def table(found):
    """A Markdown table: each figure, its aim and the measured value."""
    return "\n".join(
        ["| figure | aim | found |", "| --- | --- | --- |", *(f"| {' | '.join(line)} |" for line in lines(found))]
    )


def lines(found):
    """(figure, aim, measured value) of each part that was measured."""
    for batch_mb in BATCH_MB if "feeds" in found else ():
        of_size = [each for each in found["feeds"] if each["batch_mb"] == batch_mb]
        aims = {16: ("0.90 / 1.10 / 1.10 / 1.15", "0.88 each"), 4: ("0.70 each", "–")}[batch_mb]
        for name, words, aim in zip(("take", "gather"), ("np.take", "fastest gather"), aims, strict=True):
            sizes = "256 B / 3 KB / 12 KB / 150 KB"
            yield (
                f"feed ÷ {words}, {batch_mb} MB: {sizes}",
                aim,
                shown([each[f"feed_of_{name}"] for each in of_size]),
            )
    for each in found.get("feeds", ()):
        if (each["row_bytes"], each["batch_mb"]) == (3072, 16):
            cpu = [each["core_s_per_gb"][name] for name in ("feed", "take", "gather")]
            yield "core-seconds a GB, 3 KB, 16 MB: feed / np.take / gather", "feed ÷ gather ≤ 1.1", shown(cpu, 3)
    if "thread" in found:
        names = " / ".join(f"{each['batch_kb']} KB" for each in found["thread"])
        for name, words, aim in (
            ("next_us", "next", "≤ 30"),
            ("release_us", "letting go of the batch before", "≤ 40"),
        ):
            yield f"training thread, µs, {words}: {names}", aim, shown([each[name] for each in found["thread"]], 0)
    for name, costs in found.get("order", {}).items():
        aim = "≤ 4" if name == "C" else "–"
        yield f"order in {name}, ns a row: {' / '.join(costs)} positions", aim, shown(list(costs.values()), 1)
    if "memory" in found:
        measured = found["memory"]
        names = ("growth_mib_after_20", "growth_mib_after_2000", "new_slabs_after_20")
        grown = shown([measured[name] for name in names], 1)
        yield f"{measured['batches']:,} batches: MiB after 20 / after 2,000, new host buffers", "< 8, 0", grown
    for size, peer in found.get("peers", {}).items():
        aim = {"256": "2.0", "3072": "1.25"}.get(size, "–")
        yield f"feed ÷ best peer, {size} B ({peer['peer']})", aim, shown([peer["feed_of_peer"]])


def shown(values, digits=2):
    return " / ".join("–" if value is None else f"{value:.{digits}f}" for value in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "memory"), default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each measurement in a round")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the generated rows")
    parser.add_argument("--batches", type=int, default=100_000, help="batches of the part memory")
    parser.add_argument("--peers", type=Path, help="result that peers.py saved")
    parser.add_argument("--quick", action="store_true", help="small sizes, only to check that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the last line")
    parser.add_argument("--out", type=Path, help="file for the same object")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.gib, options.batches = 1, 0.05, 0.1, 200
    print(f"feedline {feedline.__version__} of {Path(feedline.__file__).parent}", flush=True)
    found = {"benchmark": "core", "machine": describe()}
    flat = filler(int(options.gib * 2**30)) if {"feeds", "thread"} & {*options.parts} else None
    parts = {
        "feeds": lambda: feeds(flat, options.rounds, options.seconds),
        "thread": lambda: thread(flat, min(3, options.rounds), 5 if options.quick else 300),
        "order": lambda: order(options.rounds),
        "memory": lambda: memory(options.batches),
    }
    for name in options.parts:
        found[name] = parts[name]()
    if options.peers:
        found["peers"] = best_peer(json.loads(options.peers.read_text()))
    print(table(found))
    if options.out:
        options.out.write_text(json.dumps(found) + "\n")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
