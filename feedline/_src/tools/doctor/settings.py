"""Checks of settings: GPU memory, 64-bit types, and which devices JAX uses."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.tools.doctor.check import Check

_MEMORY_PAGE = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_MOST_FRACTION = 0.95


def check_preallocation(environ: Mapping[str, str]) -> Check:
    """How JAX takes GPU memory. The rules are those of JAX's page on GPU memory."""
    name = "preallocation of GPU memory"
    own = {key: value for key, value in sorted(environ.items()) if key in _FRACTIONS}
    own |= {key: environ[key] for key in _SETTINGS if key in environ}
    told = ", ".join(f"{key}={value}" for key, value in own.items())
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return Check(
            name,
            "warning",
            told,
            "unset XLA_PYTHON_CLIENT_ALLOCATOR, except to debug a failure for lack of memory",
            f"each array is then allocated and freed by the driver, which is very slow ({_MEMORY_PAGE})",
            own,
        )
    fraction = next((environ[key] for key in _FRACTIONS if key in environ), "0.75")
    share = _number(fraction)
    if share is None or not 0 < share <= _MOST_FRACTION:
        return Check(
            name,
            "warning",
            told,
            f"set {_FRACTIONS[0]} to a number above 0 and at most {_MOST_FRACTION}; the default is 0.75",
            "CUDA's libraries allocate outside of this share, and fail when nothing is left; another value than a "
            "number is an error",
            own,
        )
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return Check(
            name,
            "note",
            told,
            f"unset it unless several processes share a GPU; then rather give each a share, by {_FRACTIONS[0]}",
            f"memory that is allocated as needed is fragmented sooner: a program that needs most of it may fail "
            f"({_MEMORY_PAGE})",
            own,
        )
    return Check(name, "ok", told or "the defaults: JAX reserves 75 % at its first operation", "", "", own)


_SETTINGS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")


def check_x64(enabled: bool) -> Check:
    """Whether JAX keeps 64-bit types."""
    measured = {"jax_enable_x64": enabled}
    if not enabled:
        return Check("64-bit types", "ok", "jax_enable_x64 is off: float64 becomes float32", "", "", measured)
    return Check(
        "64-bit types",
        "note",
        "jax_enable_x64 is on: NumPy's default float64 and int64 are shipped and computed as they are",
        "unset JAX_ENABLE_X64 unless the computation needs float64; give dtypes where arrays are made",
        "64-bit batches take twice the host memory and transfer, and most GPUs compute float64 much more slowly",
        measured,
    )


def check_devices(platform: str, gpus: int, plugins: Mapping[str, str], jaxlib: str, platforms: str) -> Check:
    """Whether JAX uses the accelerators of this machine.

    Args:
      platform: of JAX's default devices.
      gpus: NVIDIA GPUs that the driver lists.
      plugins: version of each installed CUDA plugin of JAX.
      jaxlib: its version.
      platforms: JAX_PLATFORMS; empty if it is not set.
    """
    name = "devices that JAX uses"
    measured = {"platform": platform, "gpus": gpus, "plugins": dict(plugins), "jaxlib": jaxlib}
    if platform != "cpu" or not gpus:
        return Check(name, "ok", f"platform {platform}, {gpus} NVIDIA GPUs", "", "", measured)
    others = {plugin: version for plugin, version in plugins.items() if version != jaxlib}
    if platforms:
        reason, fix = f"JAX_PLATFORMS is {platforms}", "unset JAX_PLATFORMS, or set it to cuda"
    elif not plugins:
        reason, fix = (
            "no CUDA plugin is installed",
            'pip install -U "jax[cuda13]", or "jax[cuda12]" for an older driver',
        )
    elif others:
        (plugin, version), *_ = others.items()
        reason = f"{plugin} has version {version}, and jaxlib {jaxlib}"
        fix = f"install both in one version: pip install -U {plugin}=={jaxlib}"
    else:
        reason, fix = (
            "the plugin could not start",
            "run python -c 'import jax; jax.devices()' and read its warnings",
        )
    return Check(
        name,
        "error",
        f"JAX runs on the CPU, though the driver lists {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}: {reason}",
        fix,
        "JAX warns once and then trains on the CPU, many times more slowly",
        measured,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
