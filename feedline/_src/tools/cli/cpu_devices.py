"""The option `--cpu-devices`."""

from __future__ import annotations

import os
import sys

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def use_cpu_devices(count: int) -> None:
    """Make JAX run on `count` CPU devices. JAX must not be imported yet.

    Raises:
      ValueError: JAX is already imported.
    """
    if "jax" in sys.modules:
        raise ValueError(
            "--cpu-devices must be set before jax is imported, and it is; run `feedline train` as a command, "
            f"or set JAX_PLATFORMS=cpu and XLA_FLAGS={_DEVICE_COUNT_FLAG}={count} yourself"
        )
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT_FLAG)]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_DEVICE_COUNT_FLAG}={count}"])
