"""Does feedline keep a GPU as busy as its link to the host allows, and as its arithmetic?

    python benchmarks/gpu/gpu.py --out gpu.json               # all parts, eight minutes; on a CPU always --quick
    python benchmarks/gpu/gpu.py --part modes --out gpu.json  # one part, eight minutes; the others are kept

Refuted, on a GPU, if
  - a batch of 16 MB or more in one leaf goes from feedline's slabs to the devices at less than 0.9 of the rate out
    of pinned memory. New NumPy arrays, memory registered with the devices (a private call), and memory registered
    with CUDA and taken over by DLPack are measured, too;
  - at prefetch 2 less than 0.95 of the time of transfers lies under compute, in a profiler's trace, with a step
    twice as long as a batch takes to arrive. Prefetch 1 is the control: by XLA's source it should not overlap,
    since device memory is allocated only after the compute that was enqueued before;
  - at prefetch 2 the accelerator utilisation (batches × step on resident data ÷ wall time) is below 0.99 where a
    step is 10 % longer than a batch takes to arrive;
  - a step of the reference MLP (90 × 2056 ReLU) in bfloat16 reaches less than 0.6 of the rate of matrix products
    in bfloat16, of a hidden layer or of 8192 × 8192, whichever is faster;
  - device memory, host memory, arrays or slabs grow steadily with the steps of a training of 10,000.
How fast feeds deliver rows of several sizes, as a share of the memory limit, what each mode of the trainer costs,
and what each of its practices brings, are shown without a threshold.

On CPUs the same cases run with small sizes, and no claim is judged: placing an aligned array is no copy there, and
compute and input share the cores. No figure for a GPU exists yet: statements about GPUs are from XLA's source.
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import feedline
from feedline._src.tools.bench.machine import describe
from gpu import apart, saved
from gpu.feed import feed_cases
from gpu.memory import memory_cases
from gpu.pinned import pinned_cases
from gpu.report import report, verdicts
from gpu.scale import QUICK, Scale
from gpu.steps import overlap_cases, utilisation_cases
from gpu.training import modes_cases, practices_cases
from gpu.transfer import registered_cases, transfer_cases

PARTS = {  # name: (cases, share of the time); unused time is left to the parts that follow
    "transfer": (transfer_cases, 0.16),
    "overlap": (overlap_cases, 0.12),
    "utilisation": (utilisation_cases, 0.14),
    "feed": (feed_cases, 0.12),
    "registered": (registered_cases, 0.04),
    "pinned": (pinned_cases, 0.04),
    "memory": (memory_cases, 0.06),
    "modes": (modes_cases, 0.16),
    "practices": (practices_cases, 0.16),
}


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


def measure(result, scale, names, chosen, budget_s, save):
    """Run the parts `names`, one after the other, into `result`. After each case, `save` is called with it.

    Args:
      chosen: texts; of these parts, only cases whose names contain one of them are run, and the others are kept.
        Empty: all cases.
    """
    began, granted_s = time.monotonic(), 0.0
    for name in names:
        cases_of, share = PARTS[name]
        granted_s += budget_s * share / sum(PARTS[each][1] for each in names)
        started = time.monotonic()
        found = result["sections"][name] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **saved.begun(result["sections"].get(name), chosen),
        }
        for each in apart.part(cases_of, scale, chosen, began + granted_s):
            saved.add(found, *each)
            found["wall_s"] = time.monotonic() - started
            result["verdicts"] = verdicts(result)
            save(result)


def main():
    """Exit code 1 if a case failed. A claim that does not hold is a finding, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the result; written after each case")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--case", nargs="+", default=[], help="only cases whose names contain one of these texts")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=420,
        help="no case begins that would not fit; a minute later all is ended",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, only to check that everything runs")
    parser.add_argument("--cpu-devices", type=int, default=0, help="run on this many CPU devices")
    options = parser.parse_args()
    if options.cpu_devices:  # for the processes of the parts; this one initialises no backend (see apart)
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.cpu_devices)}
    about = apart.called(120, machine)
    scale = QUICK if options.quick or about["platform"] == "cpu" else Scale()
    try:
        result = saved.opened(options.out, about, scale)
    except saved.OtherResult as error:
        parser.error(str(error))
    names = [name for name in PARTS if name in options.part]
    measure(result, scale, names, options.case, options.budget_s, lambda result: saved.save(options.out, result))
    report(result, names)
    return int(any(result["sections"][name]["errors"] for name in names))


if __name__ == "__main__":
    raise SystemExit(main())
