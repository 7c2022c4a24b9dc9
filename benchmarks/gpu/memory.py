"""Does anything grow while `fit` trains for thousands of steps: device memory, host memory, arrays, slabs?"""

import functools

from jax.sharding import NamedSharding, PartitionSpec

import feedline
from feedline._src.tools.bench.modes import step_s
from feedline._src.trainer.fitting import fit
from feedline._src.trainer.memory import MemoryWatch, held
from feedline._src.trainer.modes import AXIS, mesh_for

_BATCHES = 16  # in the data, so that it is read many times


def memory_cases(scale):
    """A small training, watched."""
    return {f"{scale.watched_steps:,} steps": functools.partial(_watched, scale)}


def _watched(scale):
    workload, steps = scale.watched, scale.watched_steps
    task, warm_up = workload.task(), max(40, steps // 20)
    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec(AXIS))
    with feedline.Feed(workload.data(_BATCHES), workload.rows, sharding) as feed:
        watch = MemoryWatch(feed, warm_up=warm_up, on_growth="ignore")
        shots = {"start": held(feed)}

        def after_step(step):
            watch.after_step()
            if step == warm_up:
                shots["warm"] = held(feed)

        fitted = fit(feed, task.init, task.loss, task.optimizer, steps=steps, after_step=after_step)
        shots["end"] = held(feed)
        grown = watch.growths()
        table = watch.report()
    return {
        "steps": steps,
        "warm_up": warm_up,
        "step_ms": step_s(fitted.progress) * 1e3,
        "held": shots,
        "growths": [growth._asdict() for growth in grown],
        "report": table,
    }
