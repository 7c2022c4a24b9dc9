"""Runs `feedline train`: builds the feeds, trains and tests the MLP with `fit`, and prints the result."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.agreement.stop import should_stop, stopping
from feedline._src.feed import Feed
from feedline._src.listen.words import counted
from feedline._src.options import Order
from feedline._src.rows.source import Source
from feedline._src.tools.cli.interrupt import EndedBySignal, interrupts_wait
from feedline._src.tools.train import labelled
from feedline._src.tools.train.labelled import Labelled
from feedline._src.tools.train.options import TrainOptions
from feedline._src.trainer.fitting import Callback, Fitted, fit
from feedline._src.trainer.live import LiveLine
from feedline._src.trainer.loop import Evaluation, Progress
from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import AXIS, mesh_for

_CLOSE_S = 2.0  # the process exits soon, which ends a thread that is stuck in a read


def train_and_test(options: TrainOptions) -> int:
    """Train, test, and print on process 0. All processes call it. Returns the exit code.

    With checkpoints, Ctrl-C and SIGTERM raise `EndedBySignal` once all processes have saved the same step. After
    the last step, a signal may have reached only this process, so this one raises only once all have tested.
    """
    own = options.data != "digits"
    data = labelled.from_files(Path(options.data), options.test_data) if own else labelled.digits()
    with (
        _feed(options, data.train, order=Order(seed=options.seed), epochs=options.passes) as feed,
        _feed(options, data.test, order=Order(shuffle=False), epochs=1, remainder="pad") as test_feed,
    ):
        fitted, signalled = _fitted(options, data, feed)
        how = "interrupted" if signalled == signal.SIGINT else "terminated"
        ended = f"{how} after step {fitted.progress.step:,}, which is saved" if _is_first_process() else ""
        if signalled is not None and fitted.stopped:
            raise EndedBySignal(ended, signalled)
        tested = fitted.evaluate(test_feed)
        result = _result(options, feed, fitted, tested)
    if _is_first_process():
        print(json.dumps(result) if options.json else _summary(result, tested, len(data.train)), flush=True)
    if signalled is not None:
        raise EndedBySignal(ended, signalled)
    return 0


def _fitted(options: TrainOptions, data: Labelled, feed: Feed) -> tuple[Fitted, int | None]:
    """Train. Also returns the number of the received signal; None without a signal, or without checkpoints."""
    sizes = Sizes(math.prod(data.train.spec["image"].shape), data.classes, options.layers, options.width)
    init, loss = classifier(sizes)
    saved = options.checkpoint_dir is not None
    if saved:
        with interrupts_wait():  # `fit` imports this module, and an interrupt would leave it half imported
            import feedline._src.trainer.checkpoints  # noqa: F401
    steps = options.steps or (options.passes or 0) * feed.steps_per_epoch
    with contextlib.ExitStack() as context:
        stop = context.enter_context(stopping()) if saved else None
        callbacks: list[Callback] = []
        if saved:
            callbacks.append(lambda progress: _print_start(options, progress))
        if not options.quiet:
            callbacks.append(context.enter_context(LiveLine(steps, feed=feed)))
        fitted = fit(
            feed,
            init,
            loss,
            optax.adam(options.learning_rate),
            mode=options.mode,
            steps=options.steps,
            seed=options.seed,
            callbacks=callbacks,
            checkpoint_dir=options.checkpoint_dir,
            save_every=options.save_every,
            after_step=should_stop if saved else None,
        )
    if saved and not fitted.history and _is_first_process():
        _print_start(options, fitted.progress)
    return fitted, None if stop is None else stop.signal


def _print_start(options: TrainOptions, progress: Progress) -> None:
    """At the first report of a run, print the step from which the run begins."""
    start = "none yet, training begins"
    if progress.resumed:
        end = "training goes on from there" if progress.step > progress.resumed else "and no step is left to do"
        start = f"step {progress.resumed:,} is saved, {end}"
    if progress.step <= progress.resumed + 1:
        print(f"feedline: checkpoints in {options.checkpoint_dir}: {start}", file=sys.stderr, flush=True)


def _is_first_process() -> bool:
    return jax.process_index() == 0


@contextlib.contextmanager
def _feed(options: TrainOptions, rows: Source, **more: Any) -> Iterator[Feed]:
    feed = Feed(rows, options.batch_size, NamedSharding(mesh_for(options.mode), P(AXIS)), **more)
    try:
        yield feed
    finally:
        feed.close(timeout_s=_CLOSE_S)


def _result(options: TrainOptions, feed: Feed, fitted: Fitted, tested: Evaluation) -> dict[str, Any]:
    """The object that --json prints. The loss is null if no step was left to train."""
    progress = fitted.progress
    steps, waits = progress.step - progress.resumed, feed.statistics().wait_share
    return {
        "mode": options.mode,
        "devices": mesh_for(options.mode).size,
        "processes": jax.process_count(),
        "steps": steps,
        "rows": progress.rows,
        "epochs": steps / feed.steps_per_epoch,
        "final_loss": progress.loss if steps else None,
        "test_accuracy": tested.metrics["accuracy"],
        "rows_per_s": progress.rows_per_s,
        "wait_share": progress.wait_share if waits is None else waits,  # as in the line of progress
        "state": feed.get_state(),
    }


def _summary(result: dict[str, Any], tested: Evaluation, rows: int) -> str:
    """Quality, speed, and what to try next; only the quality if no step was left to train."""
    correct = round(tested.metrics["accuracy"] * tested.rows)
    quality = (
        f"test accuracy {correct / tested.rows:.2%} ({correct:,} of {tested.rows:,} rows), "
        f"mean loss {tested.metrics['loss']:.4f}"
    )
    if not result["steps"]:
        return quality
    return (
        f"{quality}\n"
        f"trained {result['steps']:,} steps, {result['epochs']:.4g} epochs of {rows:,} rows, "
        f"last loss {result['final_loss']:.4f}\n"
        f"{result['rows_per_s']:,.0f} rows/s, {result['wait_share']:.1%} of the time waiting for input\n"
        f"{counted(result['devices'], 'device')}, {counted(result['processes'], 'process')}, {result['mode']}\n"
        "next: --data PATH takes your own rows, --checkpoint-dir FOLDER saves and resumes,\n"
        "and in Python feedline.trainer.fit trains your own model"
    )
