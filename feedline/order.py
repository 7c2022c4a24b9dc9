"""Which row stands at which position of an epoch: a pure function of (seed, epoch, position).

`rows_at` is a keyed permutation of the rows, so every process computes any part of any epoch's order
alone, in O(1) memory. `keys_at` gives each position a random number of its own.

*Keys.* BLAKE2b (RFC 7693) makes eight 64-bit words out of (purpose, seed, epoch). No two of these triples
share words, whereas with seed + epoch as the key, epoch 1 of seed 0 would repeat epoch 0 of seed 1.

*Few rows*, n ≤ 4096. The order is explicit: the rows, sorted by a 64-bit hash.

*Many rows.* A Feistel network on the grid Z_a × Z_b with a·b ≥ n (Black & Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). Position p is the cell (l, r) = (p div b, p mod b); the rounds take turns at

    l ← l + F₁(r) mod a,    r ← r + F₂(l) mod b,    l ← l + F₃(r) mod a,    …

and the last cell is row l·b + r. A round can be undone whatever F is, so this is a bijection of the grid.
A cell that is no row, l·b + r ≥ n, goes through the network again ("cycle walking"). Walking along the
cycles of a bijection and skipping some of its points leaves a bijection of the others: of [0, n).

F(x) is SplitMix64's finaliser (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) of x + key, scaled to the range of the half; no value is likelier than another by more than a
fraction of 4n / 2⁶⁴.

*Why eight rounds.* Take two positions that share r. After 2k rounds their l still differ by what they did
with probability 1/a + 1/b^(k-1), where chance alone gives 1/a. After two rounds that is always, after four
twice as often as it should be. After six it takes a hundred whole epochs to notice, after eight 100 n.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feedline.options import Order, checked_integer

MAX_ROWS = 1 << 62
FEW_ROWS = 4096


def rows_at(order: Order, n: int, epoch: int, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The row at each position of an epoch: for every (seed, epoch) a bijection of [0, n).

    The order never changes, not between versions nor between machines: a run that resumes relies on it.

    Args:
      order: the seed, and whether to shuffle.
      n: how many rows there are; to shuffle, at most 2⁶².
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, n), in any order, with repeats.

    Returns:
      int64[k], a new array. Without shuffling, the positions.

    Raises:
      IndexError: a position is not in [0, n).

    Example:
      >>> rows_at(Order(seed=7), 6, epoch=0, positions=np.arange(6))
      array([4, 1, 0, 2, 3, 5])
      >>> rows_at(Order(seed=7), 10**15, epoch=3, positions=np.array([0, 10**15 - 1]))
      array([834908865689940, 211942988486214])
    """
    n, epoch = checked_integer("n", n, at_least=0), _checked_word("epoch", epoch)
    _check_positions(positions, n)
    if not order.shuffle:
        return positions.astype(np.int64)
    if n > MAX_ROWS:
        raise ValueError(f"n, the number of rows to shuffle, must be at most 2^62, got {n}; split the source")
    if n <= FEW_ROWS:
        return _explicit(n, order.seed, epoch).take(positions)
    return feistel(n, words("order", order.seed, epoch), positions)


def keys_at(seed: int, epoch: int, positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A random number for each position of an epoch, to seed its augmentation with.

    It depends on (seed, epoch, position) alone, not on the number of rows, and has nothing to do with the
    order. Positions of one epoch never share a key.

    Args:
      seed: below 2⁶⁴.
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, 2⁶³), in any order, with repeats.

    Returns:
      uint64[k], uniform over all 2⁶⁴ values.

    Raises:
      IndexError: a position is not in [0, 2⁶³).

    Example:
      >>> keys_at(seed=7, epoch=0, positions=np.arange(2))
      array([ 5934308537542988519, 10794454123149485347], dtype=uint64)
    """
    seed, epoch = _checked_word("seed", seed), _checked_word("epoch", epoch)
    _check_positions(positions, 1 << 63)
    return _hashed(positions.astype(np.uint64), words("keys", seed, epoch))


@functools.lru_cache(maxsize=64)
def words(purpose: Literal["order", "keys"], seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """Eight random words for one purpose, seed and epoch."""
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=64, person=f"feedline {purpose}".encode()).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def grid(n: int) -> tuple[int, int]:
    """The sides (a, b) of a grid with a·b ≥ n ≥ 1 cells, both near √n, and hardly a cell too many.

    With m = ⌈√n⌉ and k = ⌊√(m² - n)⌋, the sides m + k and m - k have m² - k² ≥ n cells. As m² - n ≤ 2m - 2,
    at most 2k ≤ 2 √(2m - 2) < 3 n^¼ are too many: a walk costs next to nothing at any n. (Fermat's way
    of factoring n.)

    Example:
      >>> grid(10**6), grid(2**20 + 1)
      ((1000, 1000), (1070, 980))
    """
    m = math.isqrt(n - 1) + 1
    k = math.isqrt(m * m - n)
    return m + k, m - k


def feistel(n: int, keys: Sequence[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The permutation of [0, n), n ≥ 1, at these positions, with one round for each key."""
    a, b = grid(n)
    rows = _rounds(a, b, keys, positions.astype(np.uint64))
    beyond = np.flatnonzero(rows >= n)
    while beyond.size:
        rows[beyond] = walked = _rounds(a, b, keys, rows[beyond])
        beyond = beyond[walked >= n]
    return rows.view(np.int64)


def _rounds(a: int, b: int, keys: Sequence[np.uint64], cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each cell l·b + r after all rounds. Nothing overflows: a, b < 2³² and a·b < 2⁶³."""
    left = cells // b
    right = cells - left * b
    hashed, spare = np.empty_like(cells), np.empty_like(cells)
    half, size, other, other_size = left, a, right, b
    for key in keys:
        np.add(other, key, out=hashed)
        _mix(hashed, spare)
        _scale(hashed, size)
        half += hashed
        np.subtract(half, size, out=spare)  # where half < size, this wraps around and is the greater
        np.minimum(half, spare, out=half)
        half, size, other, other_size = other, other_size, half, size
    left *= b
    left += right
    return left


def _scale(hashed: NDArray[np.uint64], size: int) -> None:
    """Words to [0, size), size < 2³², in place: w ↦ ⌊⌊w / 2^s⌋ · size / 2^(64-s)⌋, s = the bits of `size`.

    As size < 2^s, the product stays below 2⁶⁴. A value is hit by ⌊M⌋ or ⌈M⌉ of the 2^(64-s) = M · size
    shifted words: by M up to the fraction 1 / M ≤ 2 size² / 2⁶⁴.
    """
    bits = size.bit_length()
    hashed >>= bits
    hashed *= size
    hashed >>= 64 - bits


@functools.lru_cache(maxsize=16)
def _explicit(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """int64[n], a permutation. The hashes are distinct, so that every way of sorting agrees."""
    rows = np.argsort(_hashed(np.arange(n, dtype=np.uint64), words("order", seed, epoch))).astype(np.int64)
    rows.flags.writeable = False
    return rows


def _hashed(counters: NDArray[np.uint64], keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """The bijection mix(mix(counter + key₀) xor key₁) of 64-bit words."""
    hashed, spare = counters + keys[0], np.empty_like(counters)
    _mix(hashed, spare)
    hashed ^= keys[1]
    _mix(hashed, spare)
    return hashed


def _mix(hashed: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, a bijection of 64-bit words, in place."""
    hashed ^= np.right_shift(hashed, 30, out=spare)
    hashed *= 0xBF58476D1CE4E5B9
    hashed ^= np.right_shift(hashed, 27, out=spare)
    hashed *= 0x94D049BB133111EB
    hashed ^= np.right_shift(hashed, 31, out=spare)


def _checked_word(name: str, value: object) -> int:
    number = checked_integer(name, value, at_least=0)
    if number >= 1 << 64:
        raise ValueError(f"{name} must be below 2^64, got {number}; use fewer bits")
    return number


def _check_positions(positions: NDArray[np.integer[Any]], end: int) -> None:
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        found = f"{positions.dtype}{list(positions.shape)}"
        raise TypeError(f"positions must be integers[k], got {found}; try positions.ravel().astype(np.int64)")
    if positions.size == 0:
        return
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= end:
        hint = "row p of a run is p % n of epoch p // n"
        raise IndexError(f"positions must be in [0, {end}), got {low} to {high}; {hint}")
