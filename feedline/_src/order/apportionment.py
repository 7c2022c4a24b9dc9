"""How many rows of each source a block of a mixture holds, and at which places of the block.

Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): of k sources, let share i be
counts[i] ÷ the rows of a block. Row r of source i, from r = 0, may be placed at place n, from n = 1, once
share · n ≥ r + δ, and must be placed while share · n ≤ r + 1 − δ. Each place takes, of the rows that may be placed
there, the one with the earliest deadline. With δ = 1 / (2k − 2) no deadline is missed, so for every i and n

    |rows of source i at the first n places − share · n| ≤ 1 − δ.

No smaller bound holds for all shares. A window is the difference of two beginnings, so any window of m places
holds share · m rows of each source to within 2 − 2δ: to within one row with two sources, less than two with more.

To within less than one row for every window is impossible with three or more sources, except for special shares.
If all shares differ, only those like 4 : 2 : 1 allow it (Fraenkel's conjecture; proven for up to seven sources).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

LARGEST_BLOCK = 1 << 16
"""Rows in a block, at the most: shares are exact, or wrong by less than one in so many rows."""


def arranged(counts: Sequence[int]) -> list[int]:
    """The source at each place of a block with so many rows of each, as the module's documentation says.

    Example:
      >>> arranged([3, 1])
      [0, 0, 1, 0]
    """
    total = sum(counts)
    margin = max(1, 2 * sum(count > 0 for count in counts) - 2)  # 1 / δ
    common = math.lcm(*filter(None, counts))
    # each row as (the first place that may have it, its deadline times margin · common ÷ total, its source)
    waiting = sorted(
        (-(-(row * margin + 1) * total // (count * margin)), ((row + 1) * margin - 1) * (common // count), i)
        for i, count in enumerate(counts)
        for row in range(count)
    )
    places, ready, released = [], list[tuple[int, int]](), 0
    for place in range(1, total + 1):
        while released < total and waiting[released][0] <= place:
            heapq.heappush(ready, waiting[released][1:])
            released += 1
        places.append(heapq.heappop(ready)[1])
    return places


def counts_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """How many rows of each source a block holds.

    The smallest block that has exactly these shares, if it has at most `LARGEST_BLOCK` rows. Otherwise a block of
    that many rows, by largest remainders: each count is within one row of its share.

    Args:
      weights: at least 0, one of them above 0. A float stands for the decimal number that it prints as.

    Raises:
      ValueError: a share is so small that a block has no row of it.

    Example:
      >>> counts_of({"web": 0.7, "code": 0.2, "books": 0.1})
      (7, 2, 1)
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(LARGEST_BLOCK) for share in shares]
    block = int(np.lcm.reduce([share.denominator for share in near], dtype=object))
    alike = all(abs(a - b) < Fraction(1, 10**12) for a, b in zip(shares, near, strict=True))
    if alike and sum(near) == 1 and block <= LARGEST_BLOCK:
        return tuple(int(share * block) for share in near)
    for name, share in zip(weights, shares, strict=True):
        if 0 < share * LARGEST_BLOCK < 1:
            raise ValueError(
                f"a share must be 0, or at least one row in {LARGEST_BLOCK:,}, and that of {name!r} is "
                f"{float(share):.3g}; raise its weight, or leave it out"
            )
    counts = [int(share * LARGEST_BLOCK) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * LARGEST_BLOCK)
    for i in by_remainder[: LARGEST_BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
