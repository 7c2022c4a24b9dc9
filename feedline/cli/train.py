"""The `feedline train` command."""

from __future__ import annotations

import dataclasses
import os
import sys

from feedline.cli.interrupt import interrupts_wait
from feedline.cli.train_options import TrainOptions

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Train(TrainOptions):
    """Train an MLP that classifies rows, and test it on rows that it was not trained on.

    Without options it learns 1,437 handwritten digits on all devices, in a few seconds. The same
    command runs on several processes: under `feedline launch`, srun or mpirun.
    """

    def run(self) -> int:
        """Train, test and print. Returns the exit code."""
        self.check()
        if self.cpu_devices is not None:
            use_cpu_devices(self.cpu_devices)
        with interrupts_wait():
            from feedline import cluster
            from feedline.agreement.stop import restore_sigterm
            from feedline.cli.train_and_test import train_and_test

        cluster.initialize()
        restore_sigterm()  # until the training loop begins, SIGTERM ends the process
        return train_and_test(self)


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
