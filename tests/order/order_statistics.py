"""The documented order, one position at a time, as an oracle; and statistics that tell an order from chance.

A statistic tests a function rows(key, positions) -> int64 rows, which for each key (seed, epoch) permutes [0, n).
It returns the p-value of pure chance. Feedline's order must pass; weaker constructions must be rejected.
Every statistic is Pearson's: Σ (seen - expected)² / variance is distributed as χ².
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from feedline._src.options import Order
from feedline._src.order.epoch import rows_at
from feedline._src.order.permutation import FEW, feistel, grid, words

Key = tuple[int, int]
Rows = Callable[[Key, NDArray[np.int64]], NDArray[np.int64]]
Keys = Callable[[int, int, NDArray[np.int64]], NDArray[np.uint64]]

PAIRS: dict[str, Callable[[int], tuple[Key, Key]]] = {
    "epochs": lambda seed: ((seed, 0), (seed, 1)),
    "seeds": lambda seed: ((seed, 0), (seed + 1, 0)),
    "high words": lambda seed: ((seed, 0), (seed + 2**32, 0)),
    "equal sums": lambda seed: ((seed, 1), (seed + 1, 0)),
    "exchanged": lambda seed: ((seed, 1000), (1000, seed)),
}

M32, M64 = 2**32 - 1, 2**64 - 1


def documented_words(purpose, seed, epoch):
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(message, person=b"feedline " + purpose.encode()).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]


def documented_mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def documented_hash(purpose, seed, epoch, counter):
    key = documented_words(purpose, seed, epoch)
    return documented_mix(documented_mix(counter + key[0] & M64) ^ key[1])


def documented_round(x, key, tweak):
    """One round of the network, as a number of 32 bits."""
    y = x * (key % 2**32 | 1) + (key >> 32) + tweak & M32
    return (y ^ y >> 16) * 0x85EBCA6B & M32


def documented_network(n, keys, index, tweak=0):
    """The permutation at one index, in Python's unbounded integers."""
    a, k = grid(n)
    left, right = divmod(index, 2**k)
    for i, key in enumerate(keys[:7]):
        if i % 2 == 0:
            right ^= documented_round(left, key, tweak) >> 32 - k
        else:
            left = (left + documented_round(right, key, tweak) * a // 2**32) % a
    number = left * 2**k + right
    return number if number < n else documented_network(n, keys, number, tweak)


def documented_row(n, seed, epoch, position, purpose="order"):
    if n <= FEW:
        return sorted(range(n), key=lambda row: documented_hash(purpose, seed, epoch, row))[position]
    return documented_network(n, documented_words(purpose, seed, epoch), position)


def documented_blocked_order(rows, window, n, seed, epoch):
    """The whole epoch, laid out block by block."""
    blocks = [range(first, min(first + rows, n)) for first in range(0, n, rows)]
    full, short = [b for b in blocks if len(b) == len(blocks[0])], [b for b in blocks if len(b) < len(blocks[0])]
    ordered = [full[documented_row(len(full), seed, epoch, i, "blocks")] for i in range(len(full))]
    if short:
        drawn = documented_words("blocks", seed, epoch)[7] * len(blocks) // 2**64
        ordered.insert(drawn // window * window + window - 1, *short)  # beyond the end, insert appends
    order, (factor, term, *_) = [], documented_words("windows", seed, epoch)
    for w in range(-(-len(ordered) // window)):
        inside = [row for block in ordered[w * window : (w + 1) * window] for row in block]
        keys, tweak = documented_words("order", seed, epoch), (w * factor + term & M64) >> 32
        order += [inside[documented_network(len(inside), keys, i, tweak)] for i in range(len(inside))]
    return order


def feedlines(n: int) -> Rows:
    return lambda key, positions: rows_at(Order(key[0]), n, key[1], positions)


def weak_rounds(n: int, rounds: int = 1) -> Rows:
    return lambda key, positions: feistel(n, words("order", *key)[:rounds], positions.astype(np.uint64))


def weak_key(n: int) -> Rows:
    return lambda key, positions: rows_at(Order(sum(key)), n, 0, positions)


def chi_square_tail(x: float, df: int) -> float:
    """P(X ≥ x) for X ~ χ²(df), which is Q(df/2, x/2).

    From Q(s + 1, z) = Q(s, z) + z^s e^-z / Γ(s + 1), beginning at Q(0, z) = 0 or Q(1/2, z) = erfc(√z).
    """
    if x <= 0:
        return 1.0
    z, first = x / 2, df % 2 / 2
    terms = (math.exp(s * math.log(z) - z - math.lgamma(s + 1)) for s in np.arange(first, df / 2))
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(z)) if df % 2 else 0.0))


def agreement(seen: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Are these counts the expected ones? Both have the same sum."""
    return chi_square_tail(float(((seen - expected) ** 2 / expected).sum()), seen.size - 1)


def evenness(values: NDArray[np.int64], n: int, buckets: int = 64) -> float:
    """Are the values uniform over [0, n)?"""
    width = -(-n // buckets)
    sizes = np.diff([*range(0, n, width), n])
    return agreement(np.bincount(values // width, minlength=sizes.size), sizes * (values.size / n))


def matches(counts: Sequence[int]) -> float:
    """Are these numbers of fixed points those of random permutations, which are Poisson(1)?"""
    chances = np.array([math.exp(-1) / math.factorial(k) for k in range(4)])
    chances = np.append(chances, 1 - chances.sum())
    return agreement(np.bincount(np.minimum(counts, 4), minlength=5), chances * len(counts))


def fair_bits(words: NDArray[np.uint64]) -> float:
    """Are the 64 bits of these k words fair coins? The ones at a bit have mean k/2 and variance k/4."""
    ones = np.array([int((words >> bit & 1).sum()) for bit in range(64)])
    return chi_square_tail(float(((ones - words.size / 2) ** 2).sum() / (words.size / 4)), 64)


def spots(n: int, b: int) -> NDArray[np.int64]:
    """All positions. If n > 2^16, only the first 256 columns of the first 256 rows of a grid that is b wide."""
    if n <= 1 << 16:
        return np.arange(n)
    return (np.arange(256)[:, None] * b + np.arange(256)).ravel()


def neighbours(rows: Rows, n: int, b: int, step: int, keys: Sequence[Key]) -> float:
    """Are the rows at positions p and p + step any distance apart?"""
    here = spots(n, b)
    apart = [rows(key, (here + step) % n) - rows(key, here) for key in keys]
    return evenness(np.concatenate(apart) % n, n)


def distance(rows: Rows, n: int, b: int, pairs: Sequence[tuple[Key, Key]]) -> float:
    """Are the rows that two keys put at one position any distance apart?"""
    here = spots(n, b)
    return evenness(np.concatenate([rows(one, here) - rows(other, here) for one, other in pairs]) % n, n)
