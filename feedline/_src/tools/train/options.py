"""The options of `feedline train`, as plain values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from feedline._src.options import checked_integer

_COUNTS = ("batch_size", "steps", "epochs", "layers", "width", "save_every", "cpu_devices")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The options of `feedline train`.

    Attributes:
      mode: jit_single: one device. jit_multi: all devices, one program over a mesh. pmap: all devices,
        one program each. All three take the same batches and reach the same losses.
      data: what to learn: digits, or the path of rows with two leaves: image, numbers of any shape (uint8 is
        divided by 255, other dtypes are not scaled), and label, an integer (0, 1, 2, ...). The path is, for
        example, a .npz file, a glob of Parquet files, or a directory with image.npy and label.npy.
      test_data: path of rows to test on, in the same format. None: rows 0, 5, 10, ... of --data are held
        out for the test, and not trained on.
      batch_size: rows in the global batch, over all devices of all processes.
      steps: batches to train on, over as many epochs as needed. Not together with --epochs.
      epochs: passes over the training rows. None: 40, unless --steps is given.
      layers: hidden layers.
      width: units in each hidden layer.
      learning_rate: learning rate of the Adam optimizer.
      seed: seed of the initial weights and of the order of rows, below 2^32.
      checkpoint_dir: save checkpoints in this directory, and continue from the newest one in it, with any
        mode and number of devices and processes. The newest 3 are kept.
      save_every: steps from one checkpoint to the next; the last step is saved too.
      cpu_devices: run on this many CPU devices in each process, to try a mesh without accelerators.
      quiet: show no line of progress while training.
      json: print the result as one line of JSON on standard output, in place of the summary.
    """

    mode: Literal["jit_single", "jit_multi", "pmap"] = "jit_multi"
    data: str = "digits"
    test_data: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    batch_size: int = 128
    steps: int | None = None
    epochs: int | None = None
    layers: int = 2
    width: int = 128
    learning_rate: float = 3e-3
    seed: int = 0
    checkpoint_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    save_every: int = 100
    cpu_devices: int | None = None
    quiet: bool = False
    json: bool = False

    @property
    def passes(self) -> int | None:
        """Epochs to train; None if the steps are given instead."""
        return None if self.steps is not None else self.epochs or 40

    def check(self) -> None:
        """Validate the options. Not done on construction, because tyro would print the error in a box."""
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None:
                checked_integer(f"--{name.replace('_', '-')}", value, at_least=1)
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"training ends after --steps or after --epochs, got --steps {self.steps} and "
                f"--epochs {self.epochs}; leave one out"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"--seed must be at least 0 and below 2^32, got {self.seed}")
        if self.test_data is not None and self.data == "digits":
            raise ValueError("--test-data needs a path as --data, got --data digits; leave out --test-data")
