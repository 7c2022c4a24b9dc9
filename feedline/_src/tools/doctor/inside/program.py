"""Finds a loop of Python that was unrolled into a compiled function: the same equations, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.tools.doctor.inside.lines import is_users, shown

_LEAST_REPEATS, _LEAST_EQUATIONS = 8, 48
_LONGEST_PERIOD, _MOST_EQUATIONS = 512, 50_000
_CHAINED = 0.9


class Unrolled(NamedTuple):
    """A loop that was unrolled.

    Attributes:
      repeats: how often its body stands in the program.
      body: equations of the body.
      line: of the user's code, of the first equation; empty if it is not known.
      equations: of the whole program.
    """

    repeats: int
    body: int
    line: str
    equations: int


def unrolled(jaxpr: Any) -> Unrolled | None:
    """The loop of most equations; None if there is none of eight iterations and more.

    Iterations use what the one before has computed. So the update of many leaves of one shape is no loop.

    Example:
      >>> import jax
      >>> def step(x):
      ...     for _ in range(30):
      ...         x = jax.numpy.sin(x) @ x
      ...     return x
      >>> unrolled(jax.make_jaxpr(step)(np.ones((3, 3))))[:2]
      (30, 2)
    """
    programs = list(_programs(jaxpr))
    total = sum(map(len, programs))
    found = [loop for equations in programs if (loop := _longest(equations, total))]
    return max(found, key=lambda loop: loop.repeats * loop.body, default=None)


def _programs(jaxpr: Any) -> Iterator[Sequence[Any]]:
    """The equations of a program, and of each program inside of it."""
    equations = jaxpr.eqns
    yield equations
    for equation in equations:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if getattr(inner, "eqns", None) is not None:
                    yield from _programs(inner)


def _longest(equations: Sequence[Any], total: int) -> Unrolled | None:
    if not _LEAST_EQUATIONS <= len(equations) <= _MOST_EQUATIONS:
        return None
    kinds: dict[Any, int] = {}
    ids = np.array([kinds.setdefault(_kind(equation), len(kinds)) for equation in equations])
    best: tuple[int, int, int] | None = None  # (equations, start, period)
    for period in range(1, min(_LONGEST_PERIOD, len(ids) // _LEAST_REPEATS) + 1):
        start, length = longest_run(ids[period:] == ids[:-period])
        covered = (length + period) // period * period
        if (
            covered >= _LEAST_REPEATS * period
            and covered >= _LEAST_EQUATIONS
            and (best is None or covered > best[0])
            and _is_chained(equations, start, period, covered)
        ):
            best = (covered, start, period)
    if best is None:
        return None
    covered, start, period = best
    return Unrolled(covered // period, period, _line_of(equations[start : start + period]), total)


def longest_run(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True.

    Example:
      >>> longest_run(np.array([True, False, True, True]))
      (2, 2)
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])


def _kind(equation: Any) -> Any:
    inside = equation.params.get("name", "")
    shapes = tuple(str(var.aval) for var in itertools.chain(equation.invars, equation.outvars))
    return (equation.primitive.name, inside, shapes)


def _is_chained(equations: Sequence[Any], start: int, period: int, covered: int) -> bool:
    """Whether each iteration uses a result of the one before."""
    before: set[int] = set()
    chained = 0
    for first in range(start, start + covered, period):
        body = equations[first : first + period]
        chained += any(id(var) in before for equation in body for var in equation.invars)
        before = {id(var) for equation in body for var in equation.outvars}
    return chained >= _CHAINED * (covered // period - 1)


def _line_of(equations: Sequence[Any]) -> str:
    for equation in equations:
        traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
        for frame in traceback.frames if traceback else ():
            if is_users(frame.file_name):
                return shown(frame.file_name, frame.line_num)
    return ""
