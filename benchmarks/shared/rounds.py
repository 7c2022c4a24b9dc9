"""Measures entrants alternately, so that a slow minute of the machine affects all of them, and compares them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_RESAMPLES = 10_000

Entrant = Callable[[float], float]
"""(seconds) → the rate reached by working for this time."""
Rates = dict[str, dict[int, float]]


def alternate(entrants: Mapping[str, Entrant], rounds: int, seconds: float) -> Rates:
    """{name: {round: rate}}. A round measures all entrants; every second round in reverse, so drift cancels."""
    rates: Rates = {name: {} for name in entrants}
    for k in range(rounds):
        for name in list(entrants)[:: -1 if k % 2 else 1]:
            rates[name][k] = entrants[name](seconds)
    return rates


def compared(rates: Rates, limit: str) -> dict[str, dict[str, Any]]:
    """{name: median rate, the median of its ratios to `limit`, the interval of `paired`, and all samples}."""
    return {
        name: {
            "median": statistics.median(of.values()),
            "of_limit": statistics.median(of[k] / rates[limit][k] for k in of),
            "of_limit_interval": [ratio["low"], ratio["high"]],
            "samples": list(of.values()),
        }
        for name, of in rates.items()
        if (ratio := paired(of, rates[limit])) is not None
    }


def paired(over: Mapping[int, float], under: Mapping[int, float]) -> dict[str, Any] | None:
    """The geometric mean, over rounds, of the ratio of two rates. A slow minute of the machine affects both rates.

    "low" and "high" are its 95 % interval, by the percentile bootstrap of the mean logarithm (Efron and Tibshirani
    1993, chapter 13); with few rounds it is somewhat too narrow. None if the two rates have no round in common.
    """
    both = sorted(over.keys() & under.keys())
    if not both:
        return None
    logs = np.log([over[k] / under[k] for k in both])
    drawn = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
    values = (logs.mean(), *np.quantile(logs[drawn].mean(axis=1), [0.025, 0.975]))
    ratio, low, high = (round(float(np.exp(value)), 4) for value in values)
    return {"ratio": ratio, "low": low, "high": high, "rounds": len(both)}
