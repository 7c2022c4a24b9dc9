"""Ratios of rates that were measured in the same rounds, with confidence intervals. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as fast one entrant is as another.

    Attributes:
      ratio: geometric mean over rounds.
      low, high: its 95 % bootstrap interval, over rounds.
      rounds: the number of rounds in which both were measured.
    """

    ratio: float
    low: float
    high: float
    rounds: int


def paired(over: Mapping[int, float], under: Mapping[int, float]) -> Ratio | None:
    """The ratio of two rates, round by round, so that a slow minute of the machine affects both.

    The interval is the percentile bootstrap of the mean logarithm (Efron and Tibshirani 1993,
    chapter 13); with few rounds it is somewhat too narrow.

    Args:
      over, under: round → rate, of any one unit.

    Returns:
      None if they share no round.

    Example:
      >>> paired({0: 4.0, 1: 6.0}, {0: 2.0, 1: 3.0})
      Ratio(ratio=2.0, low=2.0, high=2.0, rounds=2)
    """
    both = sorted(over.keys() & under.keys())
    if not both:
        return None
    logs = np.log([over[k] / under[k] for k in both])
    drawn = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
    low, high = np.quantile(logs[drawn].mean(axis=1), [0.025, 0.975])
    ratio, low, high = (round(float(np.exp(value)), 4) for value in (logs.mean(), low, high))
    return Ratio(ratio, low, high, len(both))
