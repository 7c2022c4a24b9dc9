"""The sizes of the GPU benchmark: those for accelerators, and small ones that only check that everything runs."""

import dataclasses

from feedline._src.tools.bench.workload import PRESETS, Workload


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of all cases. `seconds` is the duration of each of `rounds` measurements; MB: 10^6 bytes.

    Attributes:
      training: the MLP of the parts "modes" and "practices"; each of its measurements takes `training_seconds`.
      square: width of the square matrices that give the matrix product rate, beside those of the MLP's layers.
      watched: the MLP of the part "memory", which trains for `watched_steps` steps.
    """

    sizes_mb: tuple[float, ...] = (4, 16, 64, 256)
    leaves: tuple[int, ...] = (1, 10, 100)
    rounds: int = 5
    seconds: float = 0.3
    step_mb: float = 64
    step_row: int = 12288
    width: int = 4096
    dtype: str = "bfloat16"
    data_bytes: int = 2 << 30
    training: Workload = PRESETS["reference"]
    training_rounds: int = 3
    training_seconds: float = 1.0
    square: int = 8192
    watched: Workload = Workload(depth=2, width=256, inputs=1024, outputs=10, rows=256)  # noqa: RUF009  frozen
    watched_steps: int = 10_000


QUICK = Scale(
    sizes_mb=(1, 4),
    leaves=(1, 10),
    rounds=2,
    seconds=0.1,
    step_mb=2,
    step_row=3072,
    width=256,
    dtype="float32",
    data_bytes=32 << 20,
    training=PRESETS["small"],
    training_rounds=1,
    training_seconds=0.05,
    square=512,
    watched=PRESETS["short"],
    watched_steps=1000,
)
