"""Checks of what `fit` is given: each error names the argument, what was found, and a change that works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feedline._src.options import checked_integer
from feedline._src.trainer.practices import Practices


def check_functions(
    init: Any, loss: Any, optimizer: Any, callbacks: Any, measure: Any, after_step: Any, practices: Any
) -> None:
    """TypeError if one of them is not what `fit` calls or reads."""
    many = isinstance(callbacks, Sequence) and all(map(callable, callbacks))
    transforms = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    for name, given, is_right, wanted in (
        ("init", init, callable(init), "a function"),
        ("loss", loss, callable(loss), "a function"),
        ("measure", measure, measure is None or callable(measure), "a function"),
        ("after_step", after_step, after_step is None or callable(after_step), "a function"),
        ("optimizer", optimizer, transforms, "an optax transformation such as optax.adam(1e-3)"),
        ("callbacks", callbacks, many, "a list of functions of a Progress"),
        ("practices", practices, isinstance(practices, Practices), "a feedline.trainer.Practices"),
    ):
        if not is_right:
            raise TypeError(f"{name} must be {wanted}, got {given!r}")


def check_arguments(
    feed: Any,
    steps: int | None,
    report_every: int,
    save_every: int,
    evaluation: Any,
    evaluate_every: int | None,
) -> None:
    """ValueError or TypeError if a number is out of range, a feed has no end, or two arguments disagree."""
    checked_integer("report_every", report_every, at_least=1)
    checked_integer("save_every", save_every, at_least=1)
    if steps is not None:
        checked_integer("steps", steps, at_least=1)
    for name, given in (("feed", feed), ("evaluation", evaluation)):
        if given is not None and not hasattr(given, "spec"):
            raise TypeError(
                f"{name} must be a feedline.Feed, or have its spec: the shapes, dtypes and shardings of the "
                f"batches; got {type(given).__name__}"
            )
    if steps is None and getattr(feed, "epochs", 1) is None:
        raise ValueError("training on a feed with epochs=None would never end; give steps, or a feed with epochs")
    if (evaluation is None) != (evaluate_every is None):
        raise ValueError(
            "evaluation and evaluate_every go together; give both, or neither and test the result with "
            "fitted.evaluate(feed)"
        )
    if evaluate_every is not None:
        check_evaluation(evaluation)
        if evaluation is feed:
            raise ValueError("the evaluation would take the rows of the training; give it a feed of its own")
        if checked_integer("evaluate_every", evaluate_every, at_least=1) % report_every:
            raise ValueError(
                f"evaluate_every must be a multiple of report_every, since a report tells the result; got "
                f"{evaluate_every} and {report_every}"
            )


def check_evaluation(feed: Any) -> None:
    """ValueError if a pass over a feed does not hold each row once."""
    epochs = getattr(feed, "epochs", 1)
    if epochs != 1:
        what = "would never end" if epochs is None else "counts each row several times"
        raise ValueError(f"an evaluation feed with epochs={epochs} {what}; build it with epochs=1")
    if getattr(feed, "steps_per_call", 1) != 1:
        raise ValueError("an evaluation feed delivers its batches one by one; build it with steps_per_call=1")
