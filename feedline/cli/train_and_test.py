"""Runs `feedline train`: builds the feeds and the trainer, trains, tests and prints the result."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from feedline.cli.train_options import TrainOptions
from feedline.cli.train_steps import run_steps
from feedline.data import labelled
from feedline.data.labelled import Labelled
from feedline.feed import Feed
from feedline.options import Order, Reading
from feedline.trainer.evaluate import Evaluation, evaluate
from feedline.trainer.learner import Learner
from feedline.trainer.loop import Progress
from feedline.trainer.model import MLP, Sizes
from feedline.trainer.modes import Compiled, compiled

_CLOSE_S = 2.0  # the process exits soon, which ends a thread that is stuck in a read


def train_and_test(options: TrainOptions) -> int:
    """Train, test, and print on process 0. All processes call it. Returns the exit code."""
    data = _data(options)
    program = compiled(_learner(options, data), options.mode)
    with _training_feed(options, data, program) as feed, _test_feed(options, data, program) as test_feed:
        state, progress = run_steps(options, program, feed, len(data.train))
        tested = evaluate(program.sums, state.parameters, test_feed)
        result = _result(options, program, feed, progress, tested)
    if jax.process_index() == 0:
        print(json.dumps(result) if options.json else _summary(result, tested, len(data.train)), flush=True)
    return 0


def _data(options: TrainOptions) -> Labelled:
    if options.data == "digits":
        data = labelled.digits()
    elif options.data == "synthetic":
        data = labelled.synthetic(options.rows, options.features, options.classes)
    else:
        data = labelled.from_files(Path(options.data), options.test_data)
    if options.batch_size > len(data.train):
        raise ValueError(
            f"--batch-size must be at most the number of training rows, {len(data.train)}, got "
            f"{options.batch_size}; take --batch-size {len(data.train)} or less"
        )
    return data


def _learner(options: TrainOptions, data: Labelled) -> Learner:
    features = math.prod(data.train.spec["image"].shape)
    sizes = Sizes(features, data.classes, options.layers, options.width)
    return Learner(lambda: MLP(sizes, rngs=nnx.Rngs(options.seed)), optax.adam(options.learning_rate))


@contextlib.contextmanager
def _closing(feed: Feed) -> Iterator[Feed]:
    try:
        yield feed
    finally:
        feed.close(timeout_s=_CLOSE_S)


def _training_feed(
    options: TrainOptions, data: Labelled, program: Compiled
) -> contextlib.AbstractContextManager[Feed]:
    feed = Feed(
        data.train,
        options.batch_size,
        program.sharding,
        order=Order(seed=options.seed),
        epochs=options.passes,
        reading=Reading(threads=options.threads),
        prefetch=options.prefetch,
    )
    return _closing(feed)


def _test_feed(
    options: TrainOptions, data: Labelled, program: Compiled
) -> contextlib.AbstractContextManager[Feed]:
    feed = Feed(
        data.test,
        options.batch_size,
        program.sharding,
        order=Order(shuffle=False),
        epochs=1,
        remainder="pad",
        reading=Reading(threads=options.threads),
        prefetch=options.prefetch,
    )
    return _closing(feed)


def _result(
    options: TrainOptions, program: Compiled, feed: Feed, progress: Progress, tested: Evaluation
) -> dict[str, Any]:
    """The object that --json prints. The loss is null if no step was left."""
    return {
        "mode": options.mode,
        "devices": program.sharding.mesh.size,
        "processes": jax.process_count(),
        "steps": progress.step,
        "rows": progress.rows,
        "epochs": progress.step / feed.steps_per_epoch,
        "final_loss": progress.loss if progress.step else None,
        "test_accuracy": tested.accuracy,
        "rows_per_s": progress.rows_per_s,
        "wait_share": progress.wait_share,
        "state": feed.get_state(),
    }


def _summary(result: dict[str, Any], tested: Evaluation, rows: int) -> str:
    """The printed summary: three lines, or one if no step was left."""
    where = ", ".join(_counted(result[name], name) for name in ("devices", "processes"))
    quality = (
        f"test accuracy {tested.accuracy:.2%} ({tested.correct:,} of {_counted(tested.rows, 'rows')}), "
        f"mean loss {tested.loss:.4f}"
    )
    if not result["steps"]:
        return quality
    return (
        f"{quality}\n"
        f"trained {_counted(result['steps'], 'steps')}, {result['epochs']:.4g} epochs of {rows:,} rows, "
        f"last loss {result['final_loss']:.4f}\n"
        f"{result['rows_per_s']:,.0f} rows/s, {result['wait_share']:.1%} of the time waiting for input "
        f"({result['mode']}, {where})"
    )


def _counted(count: int, things: str) -> str:
    """Example: "1 process" for 1 and "processes"."""
    return f"{count:,} {things if count != 1 else things.removesuffix('es' if things == 'processes' else 's')}"
