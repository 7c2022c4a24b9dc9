"""The training loop of `feedline train`, from the beginning or from a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from feedline.agreement.stop import should_stop, stopping
from feedline.cli.interrupt import EndedBySignal, interrupts_wait
from feedline.cli.train_options import DEFAULT_SAVE_EVERY, TrainOptions
from feedline.errors import FeedError
from feedline.feed import Feed
from feedline.trainer.learner import Batch, State
from feedline.trainer.live import LiveLine
from feedline.trainer.loop import NotFinite, Progress, train
from feedline.trainer.memory import MemoryWatch
from feedline.trainer.modes import Compiled, mesh_for

AfterStep = Callable[[State, jax.Array], None]
_ROWS_SHOWN = 8
_NO_STEPS = Progress(step=0, rows=0, loss=math.nan, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0)


def run_steps(options: TrainOptions, program: Compiled, feed: Feed, rows: int) -> tuple[State, Progress]:
    """Train for the steps or epochs of the options, with checkpoints if they ask for them.

    Returns the last state, and the progress of this run.

    Args:
      rows: number of rows in the feed's source.

    Raises:
      KeyboardInterrupt: Ctrl-C.
      FeedError: the loss is not finite.
      EndedBySignal: Ctrl-C or SIGTERM, with checkpoints: all processes have saved the same step.
    """
    watch = MemoryWatch(feed) if options.memory else None
    try:
        return _run_with_checkpoints(options, program, feed, rows, watch)
    finally:
        if watch is not None and _is_first_process():
            with contextlib.suppress(RuntimeError):  # of JAX: it must not hide what ended the training
                print(watch.report(), file=sys.stderr, flush=True)


def _run_with_checkpoints(
    options: TrainOptions, program: Compiled, feed: Feed, rows: int, watch: MemoryWatch | None
) -> tuple[State, Progress]:
    if options.checkpoint_dir is None:
        with _naming_rows(options, feed, rows):
            return _run(program, program.init(), feed, 0, steps_left(options, feed, rows), _after_step(watch))
    with interrupts_wait():  # imported here: Orbax takes long to import, and few runs need it
        from feedline.trainer.checkpoints import Checkpoints
    mesh, every = mesh_for(options.mode), options.save_every or DEFAULT_SAVE_EVERY
    with Checkpoints(options.checkpoint_dir, feed, mesh, every) as checkpoints:
        state = checkpoints.restore(program.init())
        done, left = feed.get_state()["step"], steps_left(options, feed, rows)
        _print_once(f"checkpoints in {options.checkpoint_dir}: {_start_message(done, left)}")
        with stopping() as stop, _naming_rows(options, feed, rows):
            batches = _until_stop(feed, done)
            after_step = _after_step(watch, checkpoints.after_step)
            state, progress = _run(program, state, batches, done, left, after_step)
        checkpoints.save(state)
    if stop.signal is not None:
        how = "interrupted" if stop.signal == signal.SIGINT else "terminated"
        message = f"{how} after step {done + progress.step:,}, which is saved" if _is_first_process() else ""
        raise EndedBySignal(message, stop.signal)
    return state, progress


def _run(
    program: Compiled,
    state: State,
    batches: Iterable[Batch],
    done: int,
    left: int,
    after_step: AfterStep,
) -> tuple[State, Progress]:
    """Train `left` steps, after `done` steps of earlier runs."""
    if not left:
        return state, _NO_STEPS
    with LiveLine(done + left, done=done) if _is_first_process() else contextlib.nullcontext() as live:
        return train(program.step, state, itertools.islice(batches, left), report=live, after_step=after_step)


def _after_step(watch: MemoryWatch | None, *then: AfterStep) -> AfterStep:
    """Calls all that follows a step."""

    def after_step(state: State, loss: jax.Array) -> None:
        for call in then:
            call(state, loss)
        if watch is not None:
            watch.after_step()

    return after_step


@contextlib.contextmanager
def _naming_rows(options: TrainOptions, feed: Feed, rows: int) -> Iterator[None]:
    """Turn a `NotFinite` into a `FeedError` that lists the rows of its step."""
    began = feed.get_state()
    try:
        yield
    except NotFinite as error:
        state = _state_after(began, error.step - 1, options.batch_size, rows)
        of_batch = feed.rows_of(state)
        shown = ", ".join(map(str, of_batch[:_ROWS_SHOWN])) + (", …" if len(of_batch) > _ROWS_SHOWN else "")
        raise FeedError(
            f"training ends: the loss is {error.loss} at step {began['step'] + error.step:,}, the first at which "
            "it is no finite number, and later steps cannot mend the parameters. The batch of that step holds the "
            f"training rows {shown}; look whether they, or those of the step before, hold extreme values, or give "
            "a lower --learning-rate",
            stage="train",
            epoch=state["epoch"],
            position=state["position"],
        ) from error


def _state_after(state: Mapping[str, Any], batches: int, batch_size: int, rows: int) -> dict[str, Any]:
    """The feed's state `batches` batches after `state`, if the last rows of each epoch are dropped."""
    in_this_epoch = max(0, rows - state["position"]) // batch_size
    if batches < in_this_epoch:
        return {**state, "position": state["position"] + batches * batch_size}
    epochs, batches = divmod(batches - in_this_epoch, rows // batch_size)
    return {**state, "epoch": state["epoch"] + 1 + epochs, "position": batches * batch_size}


def steps_left(options: TrainOptions, feed: Feed, rows: int) -> int:
    """Steps from the feed's position to the end that the options ask for. Batch sizes may have changed before."""
    if options.passes is None:
        delivered: int = feed.get_state()["step"]
        return max(0, (options.steps or 0) - delivered)
    whole_epochs = options.passes - 1 - feed.epoch
    this_epoch = max(0, rows - feed.position) // options.batch_size
    return max(0, whole_epochs * feed.steps_per_epoch + this_epoch)


def _start_message(done: int, left: int) -> str:
    """The line that says from which step this run continues."""
    if not done:
        return "none yet, training begins"
    after = f"step {done:,} is saved"
    return f"{after}, training goes on from there" if left else f"{after}, and no step is left to do"


def _print_once(message: str) -> None:
    if _is_first_process():
        print(f"feedline: {message}", file=sys.stderr, flush=True)


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _until_stop(batches: Iterable[Batch], done: int) -> Iterator[Batch]:
    """Yield batches until a signal ends the loop. `done` steps were done by earlier runs."""
    for step, batch in enumerate(batches, done + 1):
        yield batch
        if should_stop(step):  # called after that step was dispatched
            return
