"""`feedline train`: the command."""

from __future__ import annotations

import dataclasses
import os
import sys

from feedline.cli.interrupt import interrupts_wait
from feedline.cli.train_options import TrainOptions

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Train(TrainOptions):
    """Train an MLP that classifies rows, and test it on rows it has not seen.

    Without options it learns 1,437 handwritten digits on all devices, in a few seconds. The same
    command runs on several processes: under `feedline launch`, srun or mpirun.
    """

    def run(self) -> int:
        """Train, test, and print. The exit code."""
        self.check()
        if self.cpu_devices is not None:
            use_cpu_devices(self.cpu_devices)
        with interrupts_wait():
            from feedline import cluster
            from feedline.agreement.stop import restore_sigterm
            from feedline.cli.training import train_and_test

        cluster.initialize()
        restore_sigterm()  # until there are steps to stop between
        return train_and_test(self)


def use_cpu_devices(count: int) -> None:
    """Have JAX, which must not be imported yet, run on `count` CPU devices.

    Raises:
      ValueError: JAX is imported, so it is too late.
    """
    if "jax" in sys.modules:
        raise ValueError(
            "--cpu-devices must be set before jax is imported, and it is; run `feedline train` as a command, "
            f"or set JAX_PLATFORMS=cpu and XLA_FLAGS={_DEVICE_COUNT_FLAG}={count} yourself"
        )
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT_FLAG)]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_DEVICE_COUNT_FLAG}={count}"])
