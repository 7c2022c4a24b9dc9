"""`fit`: trains a model of your own on the batches of a feed, with checkpoints, evaluation and callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import optax

from feedline._src.errors import warn
from feedline._src.options import checked_integer
from feedline._src.trainer.loop import Evaluation, Loop, Progress, crosses, evaluate
from feedline._src.trainer.modes import Mode, Practices, Program, compiled
from feedline._src.trainer.task import Batch, Init, Loss, Params, State, Task

if TYPE_CHECKING:
    from feedline._src.trainer.checkpoints import Checkpoints

Callback = Callable[[Progress], None]
Test = Callable[[Params], Evaluation]
_log = logging.getLogger("feedline")


class Batches(Protocol):
    """The part of a feed that `fit` needs."""

    @property
    def spec(self) -> Any:
        """The batches as `jax.ShapeDtypeStruct`s with shardings."""

    def __iter__(self) -> Iterator[Batch]: ...


@dataclasses.dataclass(frozen=True, repr=False)
class Fitted:
    """The result of `fit`, which has an example.

    Attributes:
      state: the last state.
      history: for each report a dict with "step", "loss" and the metrics of that step. If an evaluation followed
        the step, the dict also has the evaluation's metrics, as `eval_loss` and so on. Reports are made after the
        first step of a run, every `report_every` steps and at the end.
      progress: rows, times and last metrics of this run.
      stopped: whether `after_step` ended training.
    """

    state: State
    history: list[dict[str, float]]
    progress: Progress
    stopped: bool
    _tester: Callable[[Batches, Loss | None], Test]

    @property
    def params(self) -> Params:
        """The trained parameters: those of the last state."""
        return self.state.params

    def __repr__(self) -> str:
        loss = f"loss {self.progress.loss:.6g}" if self.progress.metrics else "no step was left to do"
        return f"<Fitted: step {self.progress.step:,}, {loss}>"

    def evaluate(self, feed: Batches, measure: Loss | None = None) -> Evaluation:
        """Test the trained parameters on one pass over a feed with `epochs=1` and `remainder="pad"`.

        Args:
          measure: (parameters, batch) → (loss, metrics); replaces the loss used in training.

        Raises:
          ValueError: the feed is not a single pass, has no rows, or has other devices than the training feed.
        """
        return self._tester(feed, measure)(self.params)


def fit(
    feed: Batches,
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    mode: Mode = "jit_multi",
    steps: int | None = None,
    seed: int = 0,
    evaluation: Batches | None = None,
    evaluate_every: int | None = None,
    measure: Loss | None = None,
    callbacks: Sequence[Callback] = (),
    report_every: int = 10,
    checkpoint_dir: Path | str | None = None,
    save_every: int = 100,
    after_step: Callable[[int], bool | None] | None = None,
    practices: Practices = Practices(),  # noqa: B008  frozen
) -> Fitted:
    """Train on the batches of a feed. Parameters may be any tree of arrays; no model library is needed.

    The feed's sharding splits a batch's rows over the devices; by default every device has all parameters.

    Args:
      feed: a `feedline.Feed`, or anything else with `spec` that yields batches. Checkpoints need its `get_state`
        and `set_state`. `fit` does not close the feed.
      init: key → parameters. It is compiled, and gives the same bits on any topology.
      loss: (parameters, batch) → (loss, metrics): the mean loss over the batch's rows, and a dict of other means
        over them, {} for none. It is compiled into the step. If the feed pads, leave out the rows where
        `batch["valid"]` is False. With mode "pmap", `loss` sees only the rows of one device, and the means of the
        devices are averaged, weighted by valid rows. So a loss that compares or weighs rows differs between modes.
      optimizer: an optax transformation.
      mode: "jit_single": one device. "jit_multi": one program over the mesh. "pmap": one program per device.
      steps: the total number of training steps, including the steps of earlier runs in `checkpoint_dir`. If these
        runs reached `steps`, `fit` trains no further. None: one pass over the feed. If the feed ends before
        `steps`, `fit` logs a warning.
      seed: seed of the key for `init`.
      evaluation: a feed with `epochs=1` and `remainder="pad"`. Every `evaluate_every` steps the model is tested on
        one pass over it, and the metrics go into the history. `Fitted.evaluate` tests the last state.
      evaluate_every: steps from one evaluation to the next, a multiple of `report_every`.
      measure: replaces `loss` in the evaluation.
      callbacks: functions, such as a `LiveLine`, called with a `Progress` at each report, on process 0 only.
      report_every: steps from one report to the next. The metrics of these steps stay on the devices and are
        fetched together.
      checkpoint_dir: save checkpoints there, and continue from the newest one, with any mode and topology. The
        newest 3 are kept. None: no checkpoints.
      save_every: steps from one checkpoint to the next; the last step is saved, too.
      after_step: called on every process after each step is dispatched, with the number of steps so far. If the
        result is true, training ends after this step. The result must be the same on all processes: if one process
        ends alone, the others wait for it. `feedline.cluster.should_stop` makes them agree on a step.
      practices: how the step is compiled and run.

    Raises:
      ValueError, TypeError: an argument is wrong, or does not fit the feed.
      FeedError: a loss is not finite, or the parameters are not finite at a save or at the end; the message names
        the step and the rows of its batch, and nothing is saved from that step on. Or a checkpoint cannot be read
        or written.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, feedline
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> x = np.random.default_rng(0).normal(size=(800, 3)).astype(np.float32)
      >>> rows = {"x": x, "y": x @ np.float32([1, 2, 3])}
      >>> sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
      >>> def loss(params, batch):
      ...     error = batch["x"] @ params["slope"] - batch["y"]
      ...     return jnp.mean(error**2), {"worst": jnp.mean(jnp.abs(error))}
      >>> with feedline.Feed(rows, 80, sharding) as feed:
      ...     fitted = fit(feed, lambda key: {"slope": jnp.zeros(3)}, loss, optax.sgd(0.1), steps=100)
      >>> [round(float(slope), 2) for slope in fitted.params["slope"]]
      [1.0, 2.0, 3.0]
      >>> [entry["step"] for entry in fitted.history][:3], sorted(fitted.history[0])
      ([1, 10, 20], ['loss', 'step', 'worst'])
    """
    _check_types(feed, init, optimizer, callbacks)
    _check_steps(feed, steps, evaluation, evaluate_every, report_every, save_every)
    task = Task(init, loss, optimizer, seed)
    per_call = getattr(feed, "steps_per_call", 1)
    program = compiled(task, mode, feed.spec, practices, per_call)

    def tester(feed: Batches, measure: Loss | None) -> Test:
        program = compiled(dataclasses.replace(task, loss=measure or loss), mode, feed.spec, practices)
        return lambda params: _tested(program, params, feed)

    test = None if evaluation is None else tester(evaluation, measure)
    opened: contextlib.AbstractContextManager[Checkpoints | None] = contextlib.nullcontext()
    if checkpoint_dir is not None:
        from feedline._src.trainer.checkpoints import Checkpoints  # Orbax takes long to import; few runs need it

        opened = Checkpoints(Path(checkpoint_dir), feed, program.mesh)
    history: list[dict[str, float]] = []
    evaluated: dict[int, Evaluation] = {}  # by step, until they are reported
    stopped = False

    def report(progress: Progress) -> None:
        if progress.step in evaluated:
            tested = evaluated.pop(progress.step).metrics
            metrics = {**progress.metrics, **{f"eval_{name}": mean for name, mean in tested.items()}}
            progress = dataclasses.replace(progress, metrics=metrics)
        history.append({"step": progress.step, **progress.metrics})
        for callback in callbacks if jax.process_index() == 0 else ():
            callback(progress)

    with opened as checkpoints:
        state = program.start() if checkpoints is None else checkpoints.restore(program.start)
        done = int(jax.device_get(state.step))
        left = None if steps is None else max(0, steps - done)
        if left is not None and left % per_call:
            raise ValueError(
                f"the feed delivers steps_per_call={per_call} batches at once, so {per_call} must divide the "
                f"number of remaining steps, {left} up to step {steps:,}; give other steps, or another "
                "steps_per_call"
            )
        loop = Loop(program, done, report, report_every, practices.guard_transfers, feed)
        # no `iter` on a restored feed: if the last pass is over, `iter` would begin another one
        batches: Any = feed if done and hasattr(feed, "__next__") else iter(feed)
        calls = None if left is None else left // per_call
        for state in loop.steps(state, itertools.islice(batches, calls)):  # noqa: B020  keeps the last state
            step, before = loop.dispatched, loop.dispatched - per_call
            if test is not None and evaluate_every and crosses(before, step, evaluate_every):
                evaluated[step] = test(state.params)
            if checkpoints is not None and crosses(before, step, save_every):
                loop.check(state.params)
                checkpoints.save(state)
            if after_step is not None and after_step(step):
                stopped = True
                break
        progress = loop.end()
        if progress.rows:
            loop.check(state.params)
        if steps is not None and progress.step < steps and not stopped:
            _log.warning(
                "training ended after step %d of %d, because the feed ended; give it more epochs, or epochs=None",
                progress.step,
                steps,
            )
        if checkpoints is not None:
            checkpoints.save(state)
    return Fitted(state, history, progress, stopped, tester)


def _tested(program: Program, params: Params, feed: Any) -> Evaluation:
    """Evaluate on one pass over `feed`. Warns if the feed left out rows."""
    batches, counts = _whole_pass(feed), getattr(feed, "statistics", None)
    before = counts and counts().dropped_rows
    found = evaluate(program, params, batches)
    if counts and (left_out := counts().dropped_rows - before):
        warn(
            f"the evaluation leaves out {left_out} of {found.rows + left_out} rows, which do not fill a batch; "
            'build its feed with remainder="pad", so that each row counts once'
        )
    return found


def _whole_pass(feed: Any) -> Batches:
    """Move an evaluation feed to the start of its epoch, even within a pass. ValueError: unsuitable options."""
    epochs = getattr(feed, "epochs", 1)
    if epochs != 1:
        what = "would never end" if epochs is None else "counts each row several times"
        raise ValueError(f"an evaluation feed with epochs={epochs} {what}; build it with epochs=1")
    if getattr(feed, "steps_per_call", 1) != 1:
        raise ValueError("an evaluation feed must deliver its batches one by one; build it with steps_per_call=1")
    if hasattr(feed, "seek"):
        feed.seek(feed.epoch)
    batches: Batches = feed
    return batches


def _check_types(feed: Any, init: Any, optimizer: Any, callbacks: Any) -> None:
    if not hasattr(feed, "spec"):
        raise TypeError(f"fit trains on a feedline.Feed, got {type(feed).__name__}; give feedline.Feed(rows, …)")
    if not callable(init) or hasattr(init, "apply") or not jax.tree_util.all_leaves([init]):
        raise TypeError(
            f"init must be a function of a key, got the module or tree {type(init).__name__}; docs/training.md "
            "shows how to train modules of flax and Equinox"
        )
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be an optax transformation, such as optax.adam(1e-3), got {type(optimizer).__name__}"
        )
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks must be a list of functions, got {type(callbacks).__name__}; give [callback]")


def _check_steps(
    feed: Any, steps: int | None, evaluation: Any, evaluate_every: int | None, report_every: int, save_every: int
) -> None:
    """Refuse steps that do not fit the feeds or each other."""
    checked_integer("report_every", report_every, at_least=1)
    checked_integer("save_every", save_every, at_least=1)
    if steps is not None:
        checked_integer("steps", steps, at_least=1)
    elif getattr(feed, "epochs", 1) is None:
        raise ValueError("training on a feed with epochs=None would never end; give steps, or a feed with epochs")
    if (evaluation is None) != (evaluate_every is None) or evaluation is feed:
        raise ValueError(
            "evaluation and evaluate_every go together, and evaluation must be another feed than the one to train "
            "on; give both, or give neither and test the result with fitted.evaluate(feed)"
        )
    if evaluate_every is not None:
        _whole_pass(evaluation)
        if checked_integer("evaluate_every", evaluate_every, at_least=1) % report_every:
            raise ValueError(
                f"evaluate_every must be a multiple of report_every, since the result is part of a report; got "
                f"{evaluate_every} and {report_every}"
            )
