"""Finds a Python loop that was unrolled into a compiled function: equal equations that feed each other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from feedline._src.tools.doctor.inside.stacks import is_users, shown

_MIN_REPEATS, _MIN_EQUATIONS, _MAX_EQUATIONS = 8, 48, 20_000
_MAX_CANDIDATES = 8
_CHAINED = 0.9


class Unrolled(NamedTuple):
    """A loop that was unrolled.

    Attributes:
      repeats: iterations.
      body: equations of an iteration.
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
      >>> import numpy as np
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
    yield jaxpr.eqns
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if getattr(inner, "eqns", None) is not None:
                    yield from _programs(inner)


def _longest(equations: Sequence[Any], total: int) -> Unrolled | None:
    """An iteration has one equation of each kind, so kinds that occur equally often are the body of a loop."""
    if not _MIN_EQUATIONS <= len(equations) <= _MAX_EQUATIONS:
        return None
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for i, equation in enumerate(equations):
        kinds[_kind(equation)].append(i)
    bodies: dict[int, list[list[int]]] = defaultdict(list)
    for members in kinds.values():
        bodies[len(members)].append(members)
    candidates = [n for n in bodies if n >= _MIN_REPEATS and n * len(bodies[n]) >= _MIN_EQUATIONS]
    for n in sorted(candidates, key=lambda n: -n * len(bodies[n]))[:_MAX_CANDIDATES]:
        if any(_chain(equations, members) >= _CHAINED * n for members in bodies[n][:_MAX_CANDIDATES]):
            return Unrolled(n, len(bodies[n]), _line_of(equations[bodies[n][0][0]]), total)
    return None


def _kind(equation: Any) -> Hashable:
    """The operation, its shapes and its line; the gradient of an operation has the line of the operation."""
    shapes = tuple(str(var.aval) for var in itertools.chain(equation.invars, equation.outvars))
    is_transposed = "transpose" in str(equation.source_info.name_stack)
    return equation.primitive.name, equation.params.get("name", ""), shapes, _line_of(equation), is_transposed


def _chain(equations: Sequence[Any], members: Sequence[int]) -> int:
    """The most of these equations on one path through the program."""
    counted, depths = set(members), dict[int, int]()
    for i, equation in enumerate(equations):
        depth = max((depths.get(id(var), 0) for var in equation.invars), default=0) + (i in counted)
        depths |= {id(var): depth for var in equation.outvars}
    return max(depths.values(), default=0)


def _line_of(equation: Any) -> str:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if is_users(frame.file_name):
            return shown(frame.file_name, frame.line_num)
    return ""
