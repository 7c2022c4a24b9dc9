"""The check for recompilation: which function, how often, and what had changed. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.tools.doctor.check import Check

_OFTEN = 3
_MOST_LISTED = 3


class Again(NamedTuple):
    """Something that was compiled again.

    Attributes:
      what: the function and its line.
      times: compilations after the first.
      seconds: of these.
      change: what had changed.
    """

    what: str
    times: int
    seconds: float
    change: str


def check_compilations(process: Mapping[str, Any]) -> Check:
    """Whether functions were compiled again and again."""
    name = "recompilation"
    found = [*_of_functions(process), *_made_again(process), *_of_operations(process)]
    found.sort(key=lambda again: again.seconds, reverse=True)
    count, seconds = sum(again.times for again in found), sum(again.seconds for again in found)
    measured = {"compiled_again": count, "seconds": seconds, "functions": [again._asdict() for again in found]}
    if not found:
        return Check(name, "ok", "each function was compiled once", "", "", measured)
    told = "; ".join(
        f"{again.what} was compiled {_times(again.times)} more ({again.seconds:.2f} s): {again.change}"
        for again in found[:_MOST_LISTED]
    )
    more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return Check(
        name,
        "warning" if count >= _OFTEN else "note",
        told + more,
        "keep shapes and dtypes the same (pad the last batch: remainder='pad', or 'drop'), make the function once "
        "outside of the loop, and pass values that change as arrays, not as static arguments",
        "the devices idle while a step is compiled",
        measured,
    )


def _of_functions(process: Mapping[str, Any]) -> list[Again]:
    """Functions that were called with other arguments."""
    found = []
    for function in process["functions"]:
        compilations = function["compilations"]
        if len(compilations) < 2:
            continue
        changes = [
            changed(before["arguments"], after["arguments"]) for before, after in itertools.pairwise(compilations)
        ]
        seconds = sum(each["seconds"] for each in compilations[1:])
        what = f"{function['name']} ({function['line']})"
        found.append(Again(what, len(compilations) - 1, seconds, _most_telling(changes)))
    return found


def _made_again(process: Mapping[str, Any]) -> list[Again]:
    """Functions that jax.jit made anew, at one line, and that were compiled each time."""
    found = []
    for made in process["jitted"]:
        if made["count"] < _OFTEN:
            continue
        same = [f for f in process["functions"] if (f["line"], f["name"]) == (made["line"], made["function"])]
        seconds = sum(each["seconds"] for function in same[1:] for each in function["compilations"][:1])
        change = "jax.jit was called again there, which makes a new function"
        found.append(Again(f"{made['function']} ({made['line']})", made["count"] - 1, seconds, change))
    return found


def _of_operations(process: Mapping[str, Any]) -> list[Again]:
    """Operations outside of compiled functions, at one line."""
    found = []
    often = [each for each in process["compilations"] if each["count"] >= _OFTEN]
    for line in dict.fromkeys(each["line"] for each in often):
        same = [each for each in often if each["line"] == line]
        count = sum(each["count"] - 1 for each in same)
        seconds = sum(each["seconds"] * (1 - 1 / each["count"]) for each in same)
        names = ", ".join(each["function"] for each in same[:_MOST_LISTED])
        what = f"{line} ({names}, outside of a compiled function)"
        found.append(Again(what, count, seconds, "the arguments had other shapes"))
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What differs between the arguments of two calls; empty if nothing does.

    Example:
      >>> changed({"argument 0": "float32[8]", "lr": "float 0.1"}, {"argument 0": "float32[7]", "lr": "float 0.1"})
      'argument 0: float32[8] → float32[7]'
    """
    names = [*before, *(name for name in after if name not in before)]
    found = [
        f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    return ", ".join(found[:2]) + (f" and {len(found) - 2} more arguments" if len(found) > 2 else "")


def _most_telling(changes: Sequence[str]) -> str:
    told = next((change for change in changes if change), "")
    return (
        told
        or "no argument had changed: look at settings of jax, and at static arguments that compare as different"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
