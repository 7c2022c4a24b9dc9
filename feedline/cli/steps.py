"""The training loop of `feedline train`, from the beginning or from a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

import jax

from feedline.cli.interrupt import Ended, ends_noted, interrupts_wait
from feedline.cli.train import DEFAULT_SAVE_EVERY, Train
from feedline.feed import Feed
from feedline.trainer.learner import Batch, State
from feedline.trainer.live import LiveLine
from feedline.trainer.loop import Progress, train
from feedline.trainer.modes import Compiled, mesh_for

_NOTHING = Progress(step=0, rows=0, loss=math.nan, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0)


def run_steps(options: Train, program: Compiled, feed: Feed, rows: int) -> tuple[State, Progress]:
    """Train as long as the options say, and save on the way if they say so. The last state, and what was done.

    Args:
      rows: of the feed's source.

    Raises:
      KeyboardInterrupt: Ctrl-C. With checkpoints and one process the step under way is finished and saved first,
        and SIGTERM is taken in the same way.
    """
    if options.checkpoint_dir is None:
        return _run(program, program.init(), feed, 0, steps_left(options, feed, rows))
    with interrupts_wait():  # imported here, for it takes a while and few ask for it
        from feedline.trainer.checkpoints import Checkpoints
    mesh, every = mesh_for(options.mode), options.save_every or DEFAULT_SAVE_EVERY
    with Checkpoints(options.checkpoint_dir, feed, mesh, every) as checkpoints:
        state = checkpoints.restore(program.init())
        done, left = feed.get_state()["step"], steps_left(options, feed, rows)
        _tell(f"checkpoints in {options.checkpoint_dir}: {_found(done, left)}")
        with _signals_end_the_loop() as noted:
            batches = _until(noted, feed)
            state, progress = _run(program, state, batches, done, left, checkpoints.after_step)
        checkpoints.save(state)
    if noted:
        how = "interrupted" if noted[0] == signal.SIGINT else "terminated"
        raise Ended(f"{how} after step {done + progress.step:,}, which is saved", noted[0])
    return state, progress


def _run(
    program: Compiled,
    state: State,
    batches: Iterable[Batch],
    done: int,
    left: int,
    after_step: Callable[[State], None] | None = None,
) -> tuple[State, Progress]:
    """`left` steps after the `done` ones."""
    if not left:
        return state, _NOTHING
    with LiveLine(done + left, done=done) if _first() else contextlib.nullcontext() as live:
        return train(program.step, state, itertools.islice(batches, left), report=live, after_step=after_step)


def steps_left(options: Train, feed: Feed, rows: int) -> int:
    """Steps from where the feed stands, perhaps in batches of another size until now, to the options' end."""
    if options.passes is None:
        delivered: int = feed.get_state()["step"]
        return max(0, (options.steps or 0) - delivered)
    whole_epochs = options.passes - 1 - feed.epoch
    this_epoch = max(0, rows - feed.position) // options.batch_size
    return max(0, whole_epochs * feed.steps_per_epoch + this_epoch)


def _found(done: int, left: int) -> str:
    """Where this run begins."""
    if not done:
        return "none yet, training begins"
    after = f"step {done:,} is saved"
    return f"{after}, training goes on from there" if left else f"{after}, and no step is left to do"


def _tell(message: str) -> None:
    if _first():
        print(f"feedline: {message}", file=sys.stderr, flush=True)


def _first() -> bool:
    return jax.process_index() == 0


def _until(noted: list[int], batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches up to the one after whose step a signal is in the list."""
    for batch in batches:
        yield batch
        if noted:
            return


def _signals_end_the_loop() -> contextlib.AbstractContextManager[list[int]]:
    """With several processes they do not: each would end after a step of its own, and saving takes all."""
    return ends_noted() if jax.process_count() == 1 else contextlib.nullcontext([])
