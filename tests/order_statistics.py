"""Statistics that tell an order from a random permutation. Each returns the p-value of pure chance.

What is tested is a function rows(key, positions) -> int64 rows of a key (seed, epoch), a permutation of
[0, n) for each key. All are Pearson's: Σ (seen - expected)² / expected is χ² distributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int]
Rows = Callable[[Key, NDArray[np.int64]], NDArray[np.int64]]


def chi_square_tail(x: float, df: int) -> float:
    """P(X ≥ x), X ~ χ²(df): Q(df/2, x/2) from Q(s + 1, z) = Q(s, z) + z^s e^-z / Γ(s + 1),
    which starts at Q(0, z) = 0 or at Q(1/2, z) = erfc(√z)."""
    if x <= 0:
        return 1.0
    z, start = x / 2, df % 2 / 2
    terms = (math.exp(s * math.log(z) - z - math.lgamma(s + 1)) for s in np.arange(start, df / 2))
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(z)) if df % 2 else 0.0))


def agreement(seen: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Counts that should be `expected`, both with the same sum."""
    return chi_square_tail(float(((seen - expected) ** 2 / expected).sum()), seen.size - 1)


def evenness(values: NDArray[np.int64], n: int, buckets: int = 64) -> float:
    """Values that should be uniform over [0, n)."""
    width = -(-n // buckets)
    sizes = np.diff([*range(0, n, width), n])
    return agreement(np.bincount(values // width, minlength=sizes.size), sizes * (values.size / n))


def fair_bits(words: NDArray[np.uint64]) -> float:
    """Words whose 64 bits should be fair coins: the ones at each bit have mean k/2, variance k/4."""
    ones = np.array([((words >> bit) & 1).sum() for bit in range(64)]).astype(float)
    return chi_square_tail(float(((ones - words.size / 2) ** 2).sum() / (words.size / 4)), 64)


def spots(n: int, b: int) -> NDArray[np.int64]:
    """All positions, or if those are many, 256 stretches of 256, b apart: full of structure."""
    if n <= 1 << 16:
        return np.arange(n)
    return (np.arange(256)[:, None] * b + np.arange(256)).ravel()


def neighbours(rows: Rows, n: int, b: int, step: int, keys: Iterable[Key]) -> float:
    """How far apart the rows lie of positions `step` apart should be anything."""
    here = spots(n, b)
    apart = [rows(key, (here + step) % n) - rows(key, here) for key in keys]
    return evenness(np.concatenate(apart) % n, n)


def correlation(rows: Rows, n: int, keys: Sequence[Key]) -> float:
    """Rows at positions p and p + 1 should not be correlated: √n · Pearson's r is a standard normal."""
    total = 0.0
    for key in keys:
        order = rows(key, np.arange(n))
        total += n * np.corrcoef(order, np.roll(order, 1))[0, 1] ** 2
    return chi_square_tail(total, len(keys))


def kept_distances(rows: Rows, a: int, b: int, keys: Sequence[Key]) -> float:
    """Pairs of positions i·b should lie as many rows apart, in units of b, only by chance.

    Each of the b·a(a - 1)/2 pairs does so (mod a) with probability b/(n - 1), n = a·b.
    """
    pairs = 0
    for key in keys:
        shifts = (rows(key, np.arange(a * b)).reshape(a, b) // b - np.arange(a)[:, None]) % a
        alike = np.bincount((shifts * b + np.arange(b)).ravel())
        pairs += int((alike * (alike - 1) // 2).sum())
    expected = len(keys) * b * (a * (a - 1) / 2) * b / (a * b - 1)
    return chi_square_tail((pairs - expected) ** 2 / expected, 1)


def distance(rows: Rows, n: int, b: int, pairs: Iterable[tuple[Key, Key]]) -> float:
    """How far apart the rows lie that two keys put at one position should be anything."""
    here = spots(n, b)
    return evenness(np.concatenate([rows(one, here) - rows(other, here) for one, other in pairs]) % n, n)


def fixed_points(rows: Rows, n: int, pairs: Sequence[tuple[Key, Key]]) -> float:
    """The number of positions to which two keys give the same row should be Poisson(1)."""
    here = np.arange(n)
    same = [int((rows(one, here) == rows(other, here)).sum()) for one, other in pairs]
    chances = np.array([math.exp(-1) / math.factorial(k) for k in range(4)])
    chances = np.append(chances, 1 - chances.sum())
    return agreement(np.bincount(np.minimum(same, 4), minlength=5), chances * len(pairs))


def permutations(rows: Rows, n: int, keys: Sequence[Key]) -> float:
    """Each of the n! permutations should be as frequent as any other."""
    frequency = dict.fromkeys(itertools.permutations(range(n)), 0)
    for key in keys:
        frequency[tuple(rows(key, np.arange(n)).tolist())] += 1
    return agreement(np.array([*frequency.values()]), np.full(len(frequency), len(keys) / len(frequency)))


def first_rows(rows: Rows, n: int, keys: Sequence[Key]) -> float:
    """The row at position 0 should be anything as the key changes."""
    return evenness(np.concatenate([rows(key, np.zeros(1, np.int64)) for key in keys]), n, 32)
