"""Checks for versions that are known to be faulty. Each entry names its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from feedline._src.tools.doctor.check import Check, unknown


class Fault(NamedTuple):
    """A fault of some versions of a library.

    Attributes:
      package: its name in the package index.
      first, last: the first and the last version that is known to have the fault.
      trouble: what happens.
      fix: what to do.
      source: where it is described.
    """

    package: str
    first: str
    last: str
    trouble: str
    fix: str
    source: str


FAULTS = (
    Fault(
        "grain",
        "0.2.18",
        "0.2.18",
        "closing a ThreadPrefetch iterator can wait forever for a producer that is blocked",
        "place the batches of a Grain dataset by feedline.Feed, which reads and closes it in threads of its own",
        "https://github.com/google/grain/issues/1372",
    ),
)
DRIVERS = {12: "525.60.13", 13: "580"}
"""The oldest driver on Linux for each major version of CUDA: https://docs.jax.dev/en/latest/installation.html."""
_WIDTHS = (256, 1024)
_NO_FUSION = "--xla_cpu_experimental_ynn_fusion_type="


def check_versions(versions: Mapping[str, str], faults: tuple[Fault, ...] = FAULTS) -> Check:
    """The installed versions against the known faults.

    Args:
      versions: of installed packages, by name.
    """
    met = [
        fault
        for fault in faults
        if fault.package in versions and parts(fault.first) <= parts(versions[fault.package]) <= parts(fault.last)
    ]
    measured = {fault.package: versions.get(fault.package) for fault in faults}
    if not met:
        return Check("versions with known faults", "ok", f"none of {len(faults)} known faults", "", "", measured)
    return Check(
        "versions with known faults",
        "note",
        "; ".join(f"{fault.package} {versions[fault.package]}: {fault.trouble}" for fault in met),
        "; ".join(fault.fix for fault in met),
        "reported and open: " + ", ".join(fault.source for fault in met),
        measured,
    )


def check_driver(driver: str | None, cuda: int | None) -> Check:
    """The NVIDIA driver against the oldest that JAX's CUDA wheel works with.

    Args:
      driver: its version; None without a driver.
      cuda: major version of CUDA of the installed plugin; None without one.
    """
    name = "NVIDIA driver"
    if driver is None:
        return unknown(name, "no NVIDIA driver is loaded")
    if cuda not in DRIVERS:
        return unknown(name, f"driver {driver}; no CUDA plugin of JAX that is known is installed")
    measured = {"driver": driver, "cuda": cuda, "oldest": DRIVERS[cuda]}
    if parts(driver) >= parts(DRIVERS[cuda]):
        return Check(name, "ok", f"driver {driver} for CUDA {cuda}", "", "", measured)
    return Check(
        name,
        "error",
        f"driver {driver} is older than {DRIVERS[cuda]}, the oldest for CUDA {cuda}",
        "update the driver; or install jax[cuda12], or NVIDIA's packages for forward compatibility",
        "JAX does not start on the GPU, or uses the CPU (https://docs.jax.dev/en/latest/installation.html)",
        measured,
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of the loaded NVIDIA driver; None without one."""
    file = root / "proc/driver/nvidia/version"
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text()) if file.exists() else None
    return found[0] if found else None


def gpu_count(root: Path = Path("/")) -> int:
    """The GPUs that the NVIDIA driver lists."""
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def constant_operand_is_right() -> bool:
    """Whether a matrix product with a constant, followed by a reduction, is right on this machine's CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return all(_row_sums_are_right(width) for width in _WIDTHS)


def _row_sums_are_right(width: int) -> bool:
    ones = np.ones((16, width), np.float32)
    sums = jax.jit(lambda x: (x @ jnp.ones((width, width), jnp.float32)).sum(1))(ones)
    return bool(np.allclose(np.asarray(sums), float(width) * width))


def check_constant_operand(right: bool, jaxlib: str, platform: str) -> Check:
    """XLA's fault with constant operands on CPUs: an error where JAX computes on the CPU, else a note."""
    name, measured = "constant operands on the CPU", {"right": right, "jaxlib": jaxlib}
    if right:
        return Check(name, "ok", "a product with a constant, then a sum, is right", "", "", measured)
    return Check(
        name,
        "error" if platform == "cpu" else "note",
        f"jaxlib {jaxlib} on this CPU: (x @ jnp.ones((256, 256))).sum(1) in jax.jit is wrong (seen: NaN)",
        f"pass weights as arguments of the compiled function, or set XLA_FLAGS={_NO_FUSION}",
        "a compiled function that holds a large constant matrix returns NaN on CPU devices, and only there",
        measured,
    )


def parts(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparisons.

    Example:
      >>> parts("525.60.13") < parts("580")
      True
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
