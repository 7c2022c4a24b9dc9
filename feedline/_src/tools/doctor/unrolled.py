"""Finds Python loops that were unrolled into a compiled program."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax

from feedline._src.tools.doctor.sampling import room_of, shown

_MIN_REPEATS, _MIN_EQUATIONS, _MAX_EQUATIONS = 8, 48, 20_000
_MAX_CANDIDATES = 16
_MIN_CHAINED = 0.9  # share of the iterations that use a result of the previous one


def unrolled(jaxpr: Any) -> dict[str, Any] | None:
    """Find the longest unrolled Python loop: eight or more equal iterations that use results of the previous one.

    Updates of many leaves of one shape are therefore not a loop. Returns {"repeats": number of iterations, "body":
    equations of one iteration, "loop": the user's line}, or None if there is no loop.
    """
    longest: dict[str, Any] = {"repeats": 0, "body": 0}
    for equations in _programs(jaxpr):
        kinds: dict[Hashable, list[int]] = defaultdict(list)  # an iteration has one equation of each kind
        for i, equation in enumerate(equations):
            kinds[_kind(equation)].append(i)
        body = Counter(map(len, kinds.values()))
        for members in sorted(kinds.values(), key=lambda each: -len(each) * body[len(each)])[:_MAX_CANDIDATES]:
            n, least = len(members), max(_MIN_EQUATIONS, longest["repeats"] * longest["body"] + 1)
            if n >= _MIN_REPEATS and n * body[n] >= least and _chain(equations, members) >= _MIN_CHAINED * n:
                longest = {"repeats": n, "body": body[n], "loop": _line_of(equations[members[0]])}
    return longest if longest["repeats"] else None


def _programs(jaxpr: Any) -> Iterator[Sequence[Any]]:
    """The equations of a program and of each program inside it, except for very long ones."""
    if len(jaxpr.eqns) <= _MAX_EQUATIONS:
        yield jaxpr.eqns
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _programs(inner)


def _kind(equation: Any) -> Hashable:
    """Operation, shapes, line, and whether it is a gradient, since gradients have the line of their operation."""
    shapes = tuple(str(var.aval) for var in itertools.chain(equation.invars, equation.outvars))
    is_transposed = "transpose" in str(equation.source_info.name_stack)
    return equation.primitive.name, equation.params.get("name", ""), shapes, _line_of(equation), is_transposed


def _chain(equations: Sequence[Any], members: Sequence[int]) -> int:
    """The largest number of these equations on one path through the program."""
    counted, depths = set(members), dict[int, int]()
    for i, equation in enumerate(equations):
        depth = max((depths.get(id(var), 0) for var in equation.invars), default=0) + (i in counted)
        depths |= {id(var): depth for var in equation.outvars}
    return max(depths.values(), default=0)


def _line_of(equation: Any) -> str:
    traceback = equation.source_info.traceback
    users = (frame for frame in (traceback.frames if traceback else ()) if room_of(frame.file_name) == "user")
    return next((shown(frame.file_name, frame.line_num) for frame in users), "")
