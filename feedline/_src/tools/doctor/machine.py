"""All checks of this machine, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import numpy as np

from feedline._src.cluster.topology import topology
from feedline._src.tools.doctor import devices, faults, host, processors, settings
from feedline._src.tools.doctor.check import Check, attempt, unknown

_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}


def machine_checks(environ: Mapping[str, str], data: Path | None) -> Iterator[Check]:
    """Checks the host first, then the devices. It uses the devices of this process.

    Args:
      environ: the environment of the job.
      data: a file or folder with the job's data; None: nothing is read.
    """
    yield attempt("threads and processors", lambda: processors.check_threads(processors.processors()))
    yield attempt("affinity of processors and memory", _affinity)
    yield attempt("free memory", lambda: host.check_memory(host.memory()))
    yield attempt("shared memory", lambda: host.check_shared_memory(*host.shared_memory()))
    yield attempt("open files", lambda: host.check_open_files(*host.open_files()))
    yield from _data_checks(data)
    yield settings.check_preallocation(environ)
    yield settings.check_x64(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
    yield attempt("versions with known faults", lambda: faults.check_versions(_installed({"grain"})))
    yield attempt("NVIDIA driver", lambda: faults.check_driver(faults.driver_version(), _cuda()))
    yield attempt("devices that JAX uses", lambda: _devices(environ))
    yield attempt(
        "constant operands on the CPU",
        lambda: faults.check_constant_operand(
            faults.constant_operand_is_right(), version("jaxlib"), jax.default_backend()
        ),
    )
    yield attempt(
        "overlap of loading and computing",
        lambda: devices.check_overlap(devices.overlaps(), jax.default_backend()),
    )
    yield from _bandwidth_checks()


def _affinity() -> Check:
    return processors.check_affinity(processors.processors().allowed, topology())


def _data_checks(data: Path | None) -> Iterator[Check]:
    if data is None:
        for name in ("page cache", "disk read rate"):
            yield unknown(name, "no data were named; --data FILE or --data FOLDER does")
        return
    files = host.files_below(data)
    total = sum(file.stat().st_size for file in files)
    yield attempt("page cache", lambda: host.check_page_cache(total, host.memory()))
    accelerators = 0 if jax.default_backend() == "cpu" else jax.local_device_count()
    yield attempt("disk read rate", lambda: host.check_read_rate(*host.read_rate(files), accelerators))


def _devices(environ: Mapping[str, str]) -> Check:
    return settings.check_devices(
        jax.default_backend(),
        faults.gpu_count(),
        _installed(set(_PLUGINS.values())),
        version("jaxlib"),
        environ.get("JAX_PLATFORMS", ""),
    )


def _bandwidth_checks() -> Iterator[Check]:
    if jax.default_backend() == "cpu":
        reason = "no accelerator: CPU devices use the host's memory, so nothing is transferred"
        for name in ("pageable and pinned memory", "link to the devices", "all devices at once"):
            yield unknown(name, reason)
        yield unknown("transfers under compute", "no accelerator")
        return
    local = jax.local_devices()
    try:
        one = devices.transfer_rates(local[:1])
        together = devices.transfer_rates(local) if len(local) > 1 else one
    except (RuntimeError, ValueError) as error:
        yield unknown("host-to-device bandwidth", f"the transfer failed: {' '.join(str(error).split())}")
        return
    yield devices.check_pageable(one)
    yield devices.check_link(one, devices.nvidia_links())
    yield devices.check_all_devices(one, together, len(local))
    yield unknown(
        "transfers under compute",
        "needs a profiler's trace: python benchmarks/gpu/gpu.py --part overlap --out gpu.json",
    )


def _cuda() -> int | None:
    found = _installed(set(_PLUGINS.values()))
    return next((cuda for cuda, plugin in _PLUGINS.items() if plugin in found), None)


def _installed(packages: set[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in sorted(packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
