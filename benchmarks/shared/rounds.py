"""Measures entrants alternately, so that a slow minute of the machine affects all of them, and compares them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from feedline._src.tools.bench.ratios import paired

Entrant = Callable[[float], float]
"""(seconds) → works for so many seconds and returns the rate that it reached."""
Rates = dict[str, dict[int, float]]


def alternate(entrants: Mapping[str, Entrant], rounds: int, seconds: float) -> Rates:
    """{name: {round: rate}}. Each is measured once a round. Rounds alternate their order, so that drift cancels.

    Example:
      >>> alternate({"a": lambda seconds: 2.0, "b": lambda seconds: 4.0}, rounds=2, seconds=0.1)
      {'a': {0: 2.0, 1: 2.0}, 'b': {0: 4.0, 1: 4.0}}
    """
    rates: Rates = {name: {} for name in entrants}
    for k in range(rounds):
        for name in list(entrants)[:: -1 if k % 2 else 1]:
            rates[name][k] = entrants[name](seconds)
    return rates


def compared(rates: Rates, limit: str) -> dict[str, dict[str, Any]]:
    """{name: median rate, the median of its ratios to `limit`, and all samples}.

    Example:
      >>> compared({"limit": {0: 4.0}, "feed": {0: 3.0}}, "limit")["feed"]["of_limit"]
      0.75
    """
    return {
        name: {
            "median": statistics.median(of.values()),
            "of_limit": statistics.median(of[k] / rates[limit][k] for k in of),
            "of_limit_interval": _interval(of, rates[limit]),
            "samples": list(of.values()),
        }
        for name, of in rates.items()
    }


def _interval(over: Mapping[int, float], under: Mapping[int, float]) -> list[float] | None:
    ratio = paired(over, under)
    return None if ratio is None else list(dataclasses.astuple(ratio)[1:3])
