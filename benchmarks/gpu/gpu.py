"""Does feedline keep a GPU as busy as its link to the host allows?

    python benchmarks/gpu/gpu.py --out gpu                  # all parts, four minutes; on a CPU always --quick
    python benchmarks/gpu/gpu.py --part utilisation --out gpu   # one part

Refuted, on a GPU, if
  - a batch of 16 MB or more in one leaf goes from feedline's slabs to the devices at less than 0.9 of the rate
    from pinned memory (new NumPy arrays are shown, too);
  - at prefetch 2 the accelerator utilisation (batches × step on resident data ÷ wall time) is below 0.99, although
    a step is at least 10 % longer than a batch takes to arrive.

A process that has used a GPU holds most of the GPU's memory until the process ends: JAX allocates 75 % at once. So
this process never initialises a backend. Each part runs in its own process, which writes PART.json to --out after
each case. A part that crashes or hangs ends only itself.

On CPUs the same cases run with small sizes, and no claim is judged: placing an aligned array is no copy there, and
compute and input share the cores. No figure for a GPU exists yet: statements about GPUs are from XLA's source.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import feedline
from feedline._src.tools.bench.machine import describe
from gpu.feeding import AHEAD, transfer_cases, utilisation_cases

PARTS = {"transfer": transfer_cases, "utilisation": utilisation_cases}
_GRACE_S = 60
"""How long the last case of a part may run after --seconds, before the part's processes are killed."""


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


QUICK = Scale((1, 4), (1, 10), 2, 0.1, 2, 3072, 256, "float32", 32 << 20)


def machine():
    """Host, devices, driver, versions, and the environment variables of XLA and JAX."""
    device = jax.devices()[0]
    asked = "driver_version,name,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        smi = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        smi = f"not available: {error}"
    return {
        **describe(),
        "feedline": feedline.__version__,
        "grain": version("grain"),
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "runtime": device.client.platform_version,
        "nvidia_smi": smi,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_"))},
    }


def run_part(name, options):
    """Run the cases of a part in this process, and write PART.json after each. A case that fails is recorded."""
    faulthandler.dump_traceback_later(options.seconds + _GRACE_S / 2)  # shows where it hangs
    began, about = time.monotonic(), machine()
    scale = QUICK if options.quick or about["platform"] == "cpu" else Scale()
    found = {**_empty(name), "machine": about, "scale": dataclasses.asdict(scale)}
    for case, run in PARTS[name](scale).items():
        started = time.monotonic()
        if started > began + options.seconds:
            found["skipped"].append(case)
            continue
        try:
            found["results"].append({"case": case, **run(), "wall_s": time.monotonic() - started})
        except Exception as error:  # noqa: BLE001  recorded and printed, and the exit code is 1
            traceback.print_exc()
            found["errors"][case] = f"{type(error).__name__}: {error}"
        found["wall_s"] = time.monotonic() - began
        _write(options.out / f"{name}.json", found)


def start_part(name, options):
    """Run a part in a new process, and return its result. If it takes too long, it and its children are killed."""
    path = options.out / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--here", name, "--out", options.out, "--seconds", str(options.seconds)]
    command += ["--quick"] * options.quick
    process = subprocess.Popen(command, process_group=0)  # no new session: it would outlive a job that is ended
    error = None
    try:
        if process.wait(options.seconds + _GRACE_S):
            error = f"its process died with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        error = f"it hung or was too slow, and was ended after {options.seconds + _GRACE_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its children would keep the GPU's memory
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads(path.read_text()) if path.exists() else _empty(name)
    if error:
        found["errors"]["the part"] = error
        _write(path, found)
    return found


def _empty(name):
    part = {"benchmark": "gpu", "part": name, "machine": None}
    return {**part, "results": [], "errors": {}, "skipped": [], "wall_s": 0.0}


def _write(path, found):
    """Replace the file atomically, so that a kill loses no earlier result."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    os.replace(partial, path)


def verdicts(parts):
    """[(claim, the least figure claimed, the worst found or None, whether the claim holds)] of {part: its result}.

    Whether the claim holds is None without a figure, and on CPUs, where nothing is judged.
    """
    transfer, utilisation = (parts.get(name, {"results": []})["results"] for name in PARTS)
    claims = [
        (
            "transfer from slabs ÷ from pinned memory",
            0.9,
            [e["bytes_per_s"]["staged"]["of_limit"] for e in transfer if e["leaves"] == 1 and e["mb"] >= 15.9],
        )
    ]
    for ahead in AHEAD:
        roomy = [e["au"]["2"] for e in utilisation if e["ahead"] == ahead and e["headroom"] >= 0.1]
        claims.append((f"AU at prefetch 2, {ahead} ahead", 0.99, roomy))
    judged = any((found["machine"] or {}).get("platform") == "gpu" for found in parts.values())
    return [
        (claim, least, min(figures, default=None), min(figures) >= least if figures and judged else None)
        for claim, least, figures in claims
    ]


def report(parts):
    for name, found in parts.items():
        about = found["machine"] or dict.fromkeys(("devices", "device_kind", "jax"), "unknown")
        where = f"{about['devices']} × {about['device_kind']}, jax {about['jax']}"
        print(f"\n{name}: {len(found['results'])} cases in {found['wall_s']:.0f} s, on {where}")
        for each in found["results"]:
            print(f"  {each['case']:<30} {_line(each)}")
        for case in found["skipped"]:
            print(f"  {case:<30} SKIPPED: there was no time")
        for case, why in found["errors"].items():
            print(f"  {case:<30} ERROR: {why}")
    print()
    for claim, least, found, holds in verdicts(parts):
        word = {True: "holds", False: "REFUTED", None: "not judged"}[holds]
        print(f"{claim:<42} {'–' if found is None else f'{found:.3g}':>6}, claimed at least {least}: {word}")


def _line(each):
    if "au" in each:
        au = ", ".join(f"{of:.3f} at {depth}" for depth, of in each["au"].items())
        return f"headroom {each['headroom']:.0%}; AU {au}"
    ways = each["bytes_per_s"].items()
    return ", ".join(f"{way} {of['median'] / 1e9:.2f} GB/s ({of['of_limit']:.2f})" for way, of in ways)


def main():
    """Exit code 1 if a case failed. A claim that does not hold is a finding, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results, a file for each part")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--seconds", type=float, default=120, help="of a part: no case begins after that")
    parser.add_argument("--quick", action="store_true", help="small sizes, only to check that everything runs")
    parser.add_argument("--cpu-devices", type=int, default=0, help="run on this many CPU devices")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return run_part(options.here, options)
    if options.cpu_devices:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.cpu_devices)}
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {name: start_part(name, options) for name in PARTS if name in options.part}
    report(parts)
    return int(any(found["errors"] for found in parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
