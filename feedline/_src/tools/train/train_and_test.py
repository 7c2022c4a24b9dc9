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
from feedline._src.options import Order, Reading
from feedline._src.rows.row_source import RowSource
from feedline._src.tools.cli.interrupt import EndedBySignal, interrupts_wait
from feedline._src.tools.train import labelled
from feedline._src.tools.train.labelled import Labelled
from feedline._src.tools.train.options import DEFAULT_SAVE_EVERY, TrainOptions
from feedline._src.trainer.fitting import Fitted, fit
from feedline._src.trainer.live import LiveLine
from feedline._src.trainer.loop import Evaluation, Progress
from feedline._src.trainer.memory import MemoryWatch
from feedline._src.trainer.model import Sizes, classifier
from feedline._src.trainer.modes import AXIS, Practices, mesh_for

_CLOSE_S = 2.0  # the process exits soon, which ends a thread that is stuck in a read


def train_and_test(options: TrainOptions) -> int:
    """Train, test, and print on process 0. All processes call it. Returns the exit code.

    Raises:
      KeyboardInterrupt: Ctrl-C.
      FeedError: the loss is not finite, or a checkpoint could not be read or written.
      EndedBySignal: Ctrl-C or SIGTERM, with checkpoints: all processes have saved the same step. After a signal
        that came after the last step, also the result is printed.
    """
    data = _data(options)
    order, per_call = Order(seed=options.seed), options.steps_per_call
    with (
        _feed(options, data.train, order=order, epochs=options.passes, steps_per_call=per_call) as feed,
        _feed(options, data.test, order=Order(shuffle=False), epochs=1, remainder="pad") as test_feed,
    ):
        with _reporting_memory(options, feed) as watch:
            fitted, ended_by = _fitted(options, data, feed, watch)
        tested = fitted.evaluate(test_feed)
        result = _result(options, feed, fitted, tested)
    if _is_first_process():
        print(json.dumps(result) if options.json else _summary(result, tested, len(data.train)), flush=True)
    if ended_by is not None:
        raise ended_by
    return 0


def _fitted(
    options: TrainOptions, data: Labelled, feed: Feed, watch: MemoryWatch | None
) -> tuple[Fitted, EndedBySignal | None]:
    """Train. Returns also the end by a signal that came after the last step.

    Perhaps only this process knows of such a signal, so that it is raised only once all have tested.

    Raises:
      EndedBySignal: a signal ended the training of all processes.
    """
    init, loss = classifier(
        Sizes(math.prod(data.train.spec["image"].shape), data.classes, options.layers, options.width),
        options.remat,
    )
    saved = options.checkpoint_dir is not None
    if saved:
        with interrupts_wait():  # `fit` imports it, and an interrupt would leave it half imported
            import feedline._src.trainer.checkpoints  # noqa: F401

    def total_steps() -> int:
        delivered: int = feed.get_state()["step"]
        return delivered + steps_left(options, feed, len(data.train))

    with contextlib.ExitStack() as context:
        shown = _is_first_process() and not options.quiet
        live = context.enter_context(LiveLine(total_steps, feed=feed)) if shown else None
        stop = context.enter_context(stopping()) if saved else None

        def report(progress: Progress) -> None:
            if saved and progress.step == progress.resumed + options.steps_per_call:
                _print_start(options, progress)
            if live is not None:
                live(progress)

        def after_step(step: int) -> bool:
            if watch is not None:
                watch.after_step()
            return saved and should_stop(step)

        fitted = fit(
            feed,
            init,
            loss,
            optax.adam(options.learning_rate),
            mode=options.mode,
            steps=options.steps,
            seed=options.seed,
            callbacks=[report],
            checkpoint_dir=options.checkpoint_dir,
            save_every=options.save_every or DEFAULT_SAVE_EVERY,
            after_step=after_step,
            practices=Practices(compute=options.compute, shard_state=options.shard_state),
        )
    if saved and fitted.progress.step == fitted.progress.resumed and _is_first_process():
        _print_start(options, fitted.progress)
    ended_by = None if stop is None else _end_by(stop.signal, fitted.progress.step)
    if ended_by is not None and fitted.stopped:
        raise ended_by
    return fitted, ended_by


def _end_by(number: int | None, step: int) -> EndedBySignal | None:
    if number is None:
        return None
    how = "interrupted" if number == signal.SIGINT else "terminated"
    return EndedBySignal(f"{how} after step {step:,}, which is saved" if _is_first_process() else "", number)


@contextlib.contextmanager
def _reporting_memory(options: TrainOptions, feed: Feed) -> Iterator[MemoryWatch | None]:
    """Watch the memory if the options ask for it, and print what it saw at the end."""
    watch = MemoryWatch(feed) if options.memory else None
    try:
        yield watch
    finally:
        if watch is not None and _is_first_process():
            with contextlib.suppress(RuntimeError):  # of JAX: it must not hide what ended the training
                print(watch.report(), file=sys.stderr, flush=True)


def steps_left(options: TrainOptions, feed: Feed, rows: int) -> int:
    """Steps from the feed's position to the end that the options ask for. Batch sizes may have changed before."""
    if options.passes is None:
        delivered: int = feed.get_state()["step"]
        return max(0, (options.steps or 0) - delivered)
    whole_epochs = options.passes - 1 - feed.epoch
    this_epoch = max(0, rows - feed.position) // options.batch_size
    return max(0, whole_epochs * feed.steps_per_epoch + this_epoch)


def _print_start(options: TrainOptions, progress: Progress) -> None:
    """Print from which step this run continues."""
    start = "none yet, training begins"
    if progress.resumed:
        end = "training goes on from there" if progress.step > progress.resumed else "and no step is left to do"
        start = f"step {progress.resumed:,} is saved, {end}"
    print(f"feedline: checkpoints in {options.checkpoint_dir}: {start}", file=sys.stderr, flush=True)


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _data(options: TrainOptions) -> Labelled:
    if options.data == "digits":
        data = labelled.digits()
    elif options.data == "synthetic":
        data = labelled.synthetic(options.rows)
    else:
        data = labelled.from_files(Path(options.data), options.test_data)
    if options.batch_size > len(data.train):
        raise ValueError(
            f"--batch-size must be at most the number of training rows, {len(data.train)}, got "
            f"{options.batch_size}; take --batch-size {len(data.train)} or less"
        )
    return data


@contextlib.contextmanager
def _feed(options: TrainOptions, rows: RowSource, **more: Any) -> Iterator[Feed]:
    feed = Feed(
        rows,
        options.batch_size,
        NamedSharding(mesh_for(options.mode), P(AXIS)),
        reading=Reading(threads=options.threads),
        prefetch=options.prefetch,
        **more,
    )
    try:
        yield feed
    finally:
        feed.close(timeout_s=_CLOSE_S)


def _result(options: TrainOptions, feed: Feed, fitted: Fitted, tested: Evaluation) -> dict[str, Any]:
    """The object that --json prints. The loss is null if no step was left."""
    progress = fitted.progress
    steps = progress.step - progress.resumed
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
        "wait_share": progress.wait_share,
        "state": feed.get_state(),
    }


def _summary(result: dict[str, Any], tested: Evaluation, rows: int) -> str:
    """The printed summary: three lines, or one if no step was left."""
    where = ", ".join(_counted(result[name], name) for name in ("devices", "processes"))
    correct = round(tested.metrics["accuracy"] * tested.rows)
    quality = (
        f"test accuracy {correct / tested.rows:.2%} ({correct:,} of {_counted(tested.rows, 'rows')}), "
        f"mean loss {tested.metrics['loss']:.4f}"
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
