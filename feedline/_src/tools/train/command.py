"""The `feedline train` command."""

from __future__ import annotations

import dataclasses

from feedline._src.tools.cli.interrupt import interrupts_wait
from feedline._src.tools.cli.options import use_cpu_devices
from feedline._src.tools.train.options import TrainOptions


@dataclasses.dataclass(frozen=True)
class Train(TrainOptions):
    """Train an MLP that classifies rows, and test it on rows that it was not trained on.

    Without options the MLP learns 1,437 handwritten digits on all devices, in a few seconds. The same
    command runs on several processes, under `feedline launch`, srun or mpirun.
    """

    def run(self) -> int:
        """Train, test and print. Returns the exit code."""
        self.check()
        if self.cpu_devices is not None:
            use_cpu_devices(self.cpu_devices)
        with interrupts_wait():
            from feedline import cluster
            from feedline._src.agreement.stop import restore_sigterm
            from feedline._src.tools.train.train_and_test import train_and_test

        cluster.initialize()
        restore_sigterm()  # until the training loop begins, SIGTERM ends the process
        return train_and_test(self)
