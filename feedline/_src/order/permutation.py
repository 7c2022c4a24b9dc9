"""A keyed permutation of [0, n) for any n up to 2⁶², computed at any indices, in O(1) memory.

*Keys.* BLAKE2b (RFC 7693) makes eight 64-bit words out of (purpose, seed, epoch). No two of these triples
share words, whereas with seed + epoch as the key, epoch 1 of seed 0 would repeat epoch 0 of seed 1.

*Few*, n ≤ 4096. The permutation is a table: the numbers 0 to n − 1, sorted by a 64-bit hash.

*Many.* A Feistel network on the grid Z_a × [0, b) with a·b ≥ n (Black & Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). Index p is the cell (l, r) = (p div b, p mod b); the rounds alternate between

    r ← r xor F₁(l),    l ← l + F₂(r) mod a,    r ← r xor F₃(l),    …

and the last cell gives the result l·b + r. Each round is invertible whatever F is, so the rounds are a bijection
of the grid. A result of n or more goes through the network again ("cycle walking"). The outcome is a bijection of
[0, n), because skipping points on the cycles of a bijection leaves a bijection of the other points.

F(x) begins with y = x·m + c, where m (odd) and c come from a key. Then follows the first half of MurmurHash3's
finaliser (Appleby 2011): y ← y xor y/2¹⁶ and y ← y·0x85EBCA6B, all mod 2³². F uses the top bits of y. A random c
makes y uniform. Without the xor, F would be nearly linear, and adjacent indices would show this even after five
rounds for any n, and even after seven rounds for n = 2⁶².

*Why seven rounds.* Take two indices with the same r. A round with F(r) preserves the difference of their l if
their r are still equal, otherwise by chance. So 2k + 1 rounds preserve the difference with probability 1/a +
1/b^k. For a random permutation, it is 1/a. The same holds for the r of two indices with the same l. Three rounds
preserve differences twice as often as they should. It takes 50 epochs to reveal the excess with five rounds, 50 n
epochs with seven.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LARGEST = 1 << 62
FEW = 4096
ROUNDS = 7
Purpose = Literal["order", "keys", "blocks", "windows", "spares", "mixture", "packed", "in row"]


@functools.lru_cache(maxsize=256)
def words(purpose: Purpose, seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """Eight random words for one purpose, seed and epoch."""
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=64, person=f"feedline {purpose}".encode()).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


@functools.lru_cache(maxsize=64)
def explicit(n: int, first_key: np.uint64, second_key: np.uint64) -> NDArray[np.int64]:
    """int64[n], read-only: the whole permutation, for small n. Hashes are distinct, so any sort gives the same."""
    numbers = np.argsort(hashed(np.arange(n, dtype=np.uint64), (first_key, second_key))).astype(np.int64)
    numbers.flags.writeable = False
    return numbers


def hashed(counters: NDArray[np.uint64], keys: Sequence[np.uint64]) -> NDArray[np.uint64]:
    """mix(mix(counter + key₀) xor key₁), a bijection of 64-bit words.

    `mix` is SplitMix64's finaliser (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    return _mix(_mix(counters + keys[0]) ^ keys[1])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def grid(n: int) -> tuple[int, int]:
    """(a, k): a grid of `a` rows and 2^k columns, with at least n and fewer than n + 2^k cells.

    The sides differ by a factor of at most two, so about one index in √n, or fewer, needs cycle walking.

    Example:
      >>> grid(10**6), grid(2**20 + 1)
      ((977, 10), (1025, 10))
    """
    k = (n - 1).bit_length() // 2
    return -(-n >> k), k


def feistel(
    n: int, keys: Sequence[np.uint64], indices: NDArray[np.uint64], tweaks: NDArray[np.uint32] | None = None
) -> NDArray[np.int64]:
    """The network's permutation of [0, n) at these indices, with one round for each key.

    `tweaks`, if given, are random words, one for each index: different words select different permutations.
    """
    numbers = _cells(n, keys, indices, tweaks)
    beyond = np.flatnonzero(numbers >= n)
    while beyond.size:
        walked = _cells(n, keys, numbers[beyond], None if tweaks is None else tweaks[beyond])
        numbers[beyond] = walked
        beyond = beyond[walked >= n]
    return numbers.view(np.int64)


def _cells(
    n: int, keys: Sequence[np.uint64], indices: NDArray[np.uint64], tweaks: NDArray[np.uint32] | None
) -> NDArray[np.uint64]:
    """The cell of each index after all rounds. Both halves have at most 31 bits, so no sum overflows."""
    a, k = grid(n)
    left = (indices >> k).astype(np.uint32)
    right = (indices & ((1 << k) - 1)).astype(np.uint32)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            right ^= _hashed_half(left, int(key), tweaks) >> (32 - k)
        else:
            step = (_hashed_half(right, int(key), tweaks).astype(np.uint64) * a) >> 32  # uniform over [0, a)
            left += step.astype(np.uint32)
            left = np.minimum(left, left - np.uint32(a))  # modulo a, since left - a wraps around if left < a
    return (left.astype(np.uint64) << np.uint64(k)) + right


def _hashed_half(x: NDArray[np.uint32], key: int, tweaks: NDArray[np.uint32] | None) -> NDArray[np.uint32]:
    """The y of the module's docstring. m and c are the low and the high half of the key."""
    y = x * np.uint32(key & 0xFFFFFFFF | 1) + np.uint32(key >> 32)
    if tweaks is not None:
        y += tweaks
    y ^= y >> 16
    return y * np.uint32(0x85EBCA6B)
