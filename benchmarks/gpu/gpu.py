"""Does feedline keep a GPU as busy as its link to the host allows, and as its arithmetic?

    python benchmarks/gpu/gpu.py --out gpu               # all parts, eight minutes; on a CPU always --quick
    python benchmarks/gpu/gpu.py --part modes --out gpu  # one part, eight minutes

Refuted, on a GPU, if
  - a batch of 16 MB or more in one leaf goes from feedline's slabs to the devices at less than 0.9 of the rate out
    of pinned memory. New NumPy arrays, and memory registered with CUDA and taken over by DLPack, are shown, too;
  - at prefetch 2 less than 0.95 of the time of transfers lies under compute, in a profiler's trace, with a step
    twice as long as a batch takes to arrive. Prefetch 1 is the control: by XLA's source it should not overlap,
    since device memory is allocated only after the compute that was enqueued before;
  - at prefetch 2 the accelerator utilisation (batches × step on resident data ÷ wall time) is below 0.99 where a
    step is 10 % longer than a batch takes to arrive;
  - a step of the reference MLP (90 × 2056 ReLU) in bfloat16 reaches less than 0.6 of the rate of matrix products
    in bfloat16, of a hidden layer or of 8192 × 8192, whichever is faster;
  - device memory, host memory, arrays or slabs grow steadily with the steps of a training of 10,000.
What each mode of the trainer costs, and what each of its practices brings, are shown without a threshold. How fast
feeds deliver rows of several sizes: JAX_PLATFORMS=cuda python benchmarks/claims/core.py.

A process that has used a GPU holds most of its memory until it ends: JAX allocates 75 % of it at once. So this
process never initialises a backend. Each part is a process, which writes PART.json in the folder after each case;
the cases of "modes" and "practices" are processes again. A part that crashes or hangs ends only itself.

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
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))


import feedline
from feedline._src.tools.bench.machine import describe, in_a_process
from gpu.memory import memory_cases
from gpu.pinned import pinned_cases
from gpu.report import report
from gpu.scale import QUICK, Scale
from gpu.steps import overlap_cases, utilisation_cases
from gpu.training import modes_cases, practices_cases
from gpu.transfer import transfer_cases

PARTS = {  # name: (cases, share of the time); unused time is left to the parts that follow
    "transfer": (transfer_cases, 0.2),
    "overlap": (overlap_cases, 0.14),
    "utilisation": (utilisation_cases, 0.16),
    "pinned": (pinned_cases, 0.06),
    "memory": (memory_cases, 0.08),
    "modes": (modes_cases, 0.18),
    "practices": (practices_cases, 0.18),
}
_GRACE_S = 60
"""How long the last case of a part may go on after the part's deadline. Then its processes are killed."""


def machine():
    """Host, devices, driver, versions, and the environment variables of XLA and JAX. Initialises the backend."""
    device = jax.devices()[0]
    return {
        **describe(),
        "feedline": feedline.__version__,
        "grain": version("grain"),
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "runtime": device.client.platform_version,
        "driver": _nvidia_smi("driver_version"),
        "nvidia_smi": _nvidia_smi("name,memory.total,pcie.link.gen.current,pcie.link.width.current"),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_"))},
    }


def _nvidia_smi(fields):
    try:
        asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {error}"


def run_part(name, options):
    """Run the cases of a part in this process, and write PART.json after each."""
    faulthandler.dump_traceback_later(options.seconds + _GRACE_S / 2)  # shows where it hangs
    began = time.monotonic()
    about = in_a_process(machine)
    scale = QUICK if options.quick or about["platform"] == "cpu" else Scale()
    found = {**_empty(name), "machine": about, "scale": dataclasses.asdict(scale)}
    cases = PARTS[name][0](scale)
    chosen = {case: run for case, run in cases.items() if any(text in case for text in options.case or [""])}
    for kind, case, value in section(chosen, began + options.seconds):
        if kind == "results":
            found["results"].append(value)
        else:
            found[kind][case] = value
        found["wall_s"] = time.monotonic() - began
        _write(options.out / f"{name}.json", found)


def section(cases, deadline):
    """Run each case that there is time for: yields ("results", case, figures), or if it fails ("errors", case,
    message), and the others run. Those without time: ("skipped", case, why).

    Args:
      deadline: by `time.monotonic()`. No case begins that would end later if it took as long as the longest yet.
    """
    longest = 0.0
    for name, case in cases.items():
        started = time.monotonic()
        if started + longest > deadline:
            left = max(0, deadline - started)
            yield "skipped", name, f"{left:.1f} s were left, and a case took up to {longest:.1f} s"
            continue
        try:
            figures = case()
            yield "results", name, {"case": name, **figures, "wall_s": time.monotonic() - started}
        except Exception as error:  # noqa: BLE001  recorded and printed, and the exit code is 1
            traceback.print_exc()
            yield "errors", name, f"{type(error).__name__}: {error}"
        longest = max(longest, time.monotonic() - started)


def start_part(name, options, seconds):
    """Run a part in a new process, which is killed with all that it started if it takes too long. Its result."""
    path = options.out / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--here", name, "--out", options.out, "--seconds", str(seconds)]
    command += ["--quick"] * options.quick + (["--case", *options.case] if options.case else [])
    process = subprocess.Popen(command, process_group=0)  # no session: that would outlive a job that is ended
    error = None
    try:
        if process.wait(seconds + _GRACE_S):
            error = f"its process died with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        error = f"it hung or was too slow, and was ended after {seconds + _GRACE_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what is left would keep the GPU's memory
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads(path.read_text()) if path.exists() else _empty(name)
    if error:
        found["errors"]["the part"] = error
        _write(path, found)
    return found


def _empty(name):
    now = datetime.now(UTC).isoformat(timespec="seconds")
    part = {"benchmark": "gpu", "part": name, "at": now, "machine": None}
    return {**part, "results": [], "errors": {}, "skipped": {}, "wall_s": 0.0}


def _write(path, found):
    """Replace the file, so that a process which is killed meanwhile loses nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    os.replace(partial, path)


def main():
    """Exit code 1 if a case failed. A claim that does not hold is a finding, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results, a file for each part")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--case", nargs="+", default=[], help="only cases whose names contain one of these texts")
    parser.add_argument(
        "--seconds", type=float, default=420, help="no case begins that would not fit; a minute later all is ended"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, only to check that everything runs")
    parser.add_argument("--cpu-devices", type=int, default=0, help="run on this many CPU devices")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return run_part(options.here, options)
    if options.cpu_devices:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.cpu_devices)}
    options.out.mkdir(parents=True, exist_ok=True)
    began, granted_s, parts = time.monotonic(), 0.0, {}
    names = [name for name in PARTS if name in options.part]
    for name in names:
        granted_s += options.seconds * PARTS[name][1] / sum(PARTS[each][1] for each in names)
        parts[name] = start_part(name, options, max(0.0, began + granted_s - time.monotonic()))
    report(parts)
    return int(any(found["errors"] for found in parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
