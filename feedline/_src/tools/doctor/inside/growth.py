"""What grows with the steps of the loop: arrays on devices, and host memory."""

from __future__ import annotations

from typing import Any

import jax

from feedline._src.trainer.memory import MemoryWatch

_EVERY, _WARM_UP = 5, 10


class Growth:
    """Watches the memory of this process.

    Args:
      function: whose calls are the steps.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._steps = 0
        self._watch = MemoryWatch(every=_EVERY, warm_up=_WARM_UP, on_growth="ignore")

    def after_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._watch.after_step()

    def as_object(self) -> dict[str, Any]:
        """The steps, what grows, and what the allocators of the devices say."""
        return {
            "steps": self._steps,
            "growths": [{"text": str(growth), **growth._asdict()} for growth in self._watch.growths()],
            "allocators": [device.memory_stats() for device in jax.local_devices()],
        }
