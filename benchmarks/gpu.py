"""Does feedline keep a GPU as busy as its link to the host allows?

    python benchmarks/gpu.py --out gpu.json       # under eight minutes; --quick: about one; on a CPU always quick
    python benchmarks/plot_gpu.py gpu.json gpu.png

Refuted, on a GPU, if
  - a batch of 16 MB or more in one leaf goes from feedline's slabs to the devices at less than 0.9 of the rate out
    of pinned memory. New NumPy arrays and memory registered with the devices (a private call) are measured, too;
  - at prefetch 2 less than 0.95 of the time of transfers lies under compute, in a profiler's trace, with a step
    twice as long as a batch takes to arrive. Prefetch 1 is the control: by XLA's source it should not overlap,
    since device memory is allocated only after the compute that was enqueued before;
  - at prefetch 2 the accelerator utilisation (batches × step on resident data ÷ wall time) is below 0.99 where a
    step is 10 % longer than a batch takes to arrive.
How fast feeds deliver rows of several sizes, as a share of the memory limit, is shown without a threshold.

On CPUs the same cases run with small sizes, and no claim is judged: placing an aligned array is no copy there, and
compute and input share the cores. No figure for a GPU exists yet: statements about GPUs are from XLA's source.
"""

import argparse
import dataclasses
import faulthandler
import functools
import json
import os
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
from gpu_steps import AHEAD, overlap_cases, utilisation_cases
from gpu_transfer import registered_cases, transfer_cases

from feedline.bench.feed import matrix
from feedline.bench.machine import describe


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of all cases. `seconds` is the duration of each of `rounds` measurements; MB: 10^6 bytes."""

    sizes_mb: tuple[float, ...] = (4, 16, 64, 256)
    leaves: tuple[int, ...] = (1, 10, 100)
    rounds: int = 5
    seconds: float = 0.3
    step_mb: float = 64
    step_row: int = 12288
    width: int = 4096
    dtype: str = "bfloat16"
    data_bytes: int = 2 << 30
    feed_rows: tuple[int, ...] = (256, 3072, 12288, 153600)
    feed_mb: float = 16


QUICK = Scale((1, 4), (1, 10), 2, 0.1, 2, 3072, 256, "float32", 32 << 20, (256, 12288), 2)


def feed_cases(scale):
    """Rows per second of feeds from memory and from a mapped file, measured alternately with the memory limit."""

    def measured(row_bytes):
        with tempfile.TemporaryDirectory() as folder:
            sizes, batches = [row_bytes], [int(scale.feed_mb * 1e6)]
            seconds = max(0.3, scale.seconds)  # in less time, the limit's threads may not have started
            (found,) = matrix(
                Path(folder), scale.data_bytes, sizes, batches, scale.rounds, seconds, lambda _: None
            )
        return found

    return {f"rows of {size} B": functools.partial(measured, size) for size in scale.feed_rows}


SECTIONS = {  # name: (cases, share of the time); unused time is left to the following sections
    "transfer": (transfer_cases, 0.3),
    "overlap": (overlap_cases, 0.2),
    "utilisation": (utilisation_cases, 0.25),
    "feed": (feed_cases, 0.2),
    "registered": (registered_cases, 0.05),
}


def section(cases, deadline):
    """Run each case that there is time for. If a case fails, its error is recorded, and the others run."""
    began, longest = time.monotonic(), 0.0
    results, errors, skipped = [], {}, {}
    for name, case in cases.items():
        started = time.monotonic()
        if started + longest > deadline:
            skipped[name] = f"{max(0, deadline - started):.1f} s were left, and a case took up to {longest:.1f} s"
            continue
        try:
            results.append({"case": name, **case(), "wall_s": time.monotonic() - started})
        except Exception as error:  # noqa: BLE001  recorded and printed, and the exit code is 1
            errors[name] = f"{type(error).__name__}: {error}"
        longest = max(longest, time.monotonic() - started)
    return {"wall_s": time.monotonic() - began, "results": results, "errors": errors, "skipped": skipped}


def machine():
    """Host, devices, driver, versions, and the environment variables of XLA and JAX."""
    device = jax.devices()[0]
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"not available: {error}"
    return {
        **describe(),
        "grain": version("grain"),
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "runtime": device.client.platform_version,
        "nvidia_smi": driver,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_"))},
    }


def verdicts(result):
    """[{"claim", "least", "found": the lowest figure, "holds"}]. None: not measured, or nothing can be judged."""
    transfer, overlap, utilisation = (
        result["sections"][name]["results"] for name in ("transfer", "overlap", "utilisation")
    )
    sent = [each for each in transfer if each["leaves"] == 1 and each["mb"] >= 15.9]
    claims = [
        ("transfer from slabs ÷ from pinned memory", 0.9, [e["bytes_per_s"]["staged"]["of_limit"] for e in sent])
    ]
    for ahead in AHEAD:
        shares = [e["share"] for e in overlap if (e["prefetch"], e["ahead"]) == (2, ahead)]
        roomy = [e for e in utilisation if e["ahead"] == ahead and e["headroom"] >= 0.1]
        claims += [
            (f"share hidden at prefetch 2, {ahead} ahead", 0.95, [share for share in shares if share is not None]),
            (f"AU at prefetch 2, {ahead} ahead", 0.99, [e["au"]["2"] for e in roomy]),
        ]
    judged = result["machine"]["platform"] == "gpu"
    return [
        {
            "claim": claim,
            "least": least,
            "found": min(found, default=None),
            "holds": min(found) >= least if found and judged else None,
        }
        for claim, least, found in claims
    ]


def report(result):
    """Print the results."""
    machine = result["machine"]
    print(
        f"{machine['devices']} × {machine['device_kind']}, jax {machine['jax']}, {machine['processor']}, "
        f"{machine['cores']} cores"
    )
    for name, found in result["sections"].items():
        print(f"\n{name}: {len(found['results'])} cases in {found['wall_s']:.0f} s")
        for each in found["results"]:
            print(f"  {each['case']:<30} {_line(each)}")
        for state in ("skipped", "errors"):
            for case, why in found[state].items():
                print(f"  {case:<30} {state.upper()}: {why}")
    print()
    for each in result["verdicts"]:
        word = {True: "holds", False: "REFUTED", None: "not judged"}[each["holds"]]
        found = "–" if each["found"] is None else f"{each['found']:.3f}"
        print(f"{each['claim']:<42} {found:>6}, claimed {each['least']}: {word}")


def _line(each):
    if "unavailable" in each:
        return f"not available: {each['unavailable']}"
    if "share" in each:
        seen = "no transfer seen" if each["share"] is None else f"{each['share']:.3f} hidden"
        return f"{seen}: {each['transfers']} transfers, {each['transfer_s'] * 1e3:.1f} ms"
    if "au" in each:
        au = ", ".join(f"{of:.3f} at {depth}" for depth, of in each["au"].items())
        return f"headroom {each['headroom']:.0%}; AU {au}"
    entrants, size = (each["bytes_per_s"], 1) if "bytes_per_s" in each else (each["entrants"], each["row_bytes"])
    return ", ".join(
        f"{x} {of['median'] * size / 1e9:.2f} GB/s ({of['of_limit']:.2f})" for x, of in entrants.items()
    )


def measure(scale, budget_s, only, save):
    """Run all sections, one after the other. After each, `save` is called with the result so far."""
    began, granted = time.monotonic(), 0.0
    empty = {"wall_s": 0.0, "results": [], "errors": {}}
    result = {
        "benchmark": "gpu",
        "machine": machine(),
        "options": {"budget_s": budget_s, "only": only, **dataclasses.asdict(scale)},
        "sections": {name: {**empty, "skipped": {"all": "not reached"}} for name in SECTIONS},
    }
    for name, (cases_of, share) in SECTIONS.items():
        granted += share * budget_s
        if name in only:
            result["sections"][name] = section(cases_of(scale), began + granted)
        else:
            result["sections"][name]["skipped"] = {"all": "not among --only"}
        result["verdicts"] = verdicts(result)
        result["wall_s"] = time.monotonic() - began
        save(result)
    return result


def main():
    """Exit code 1 if a case failed. A claim that does not hold is a finding, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the result; written after each section")
    parser.add_argument("--budget-s", type=float, default=480, help="cases that do not fit are skipped and listed")
    parser.add_argument("--quick", action="store_true", help="small sizes, only to check that everything runs")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--cpu-devices", type=int, default=0, help="run on this many CPU devices")
    options = parser.parse_args()
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    # a call that hangs cannot be interrupted; the results of the earlier sections are saved
    faulthandler.dump_traceback_later(options.budget_s + 60, exit=True)
    scale = QUICK if options.quick or jax.default_backend() == "cpu" else Scale()
    result = measure(
        scale, options.budget_s, options.only, lambda result: options.out.write_text(json.dumps(result))
    )
    faulthandler.cancel_dump_traceback_later()
    report(result)
    return int(any(found["errors"] for found in result["sections"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
