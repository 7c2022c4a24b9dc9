"""A keyed permutation of [0, n) for any n up to 2⁶², computed at any indices, in O(1) memory.

*Keys.* BLAKE2b (RFC 7693) makes eight 64-bit words out of (purpose, seed, epoch). No two of these triples
share words, whereas with seed + epoch as the key, epoch 1 of seed 0 would repeat epoch 0 of seed 1.

*Few*, n ≤ 4096. The permutation is explicit: the numbers, sorted by a 64-bit hash.

*Many.* A Feistel network on the grid Z_a × [0, b) with a·b ≥ n (Black & Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). Index p is the cell (l, r) = (p div b, p mod b); the rounds alternate between

    r ← r xor F₁(l),    l ← l + F₂(r) mod a,    r ← r xor F₃(l),    …

and the last cell gives the result l·b + r. Each round is invertible whatever F is, so this is a bijection of the
grid. A result that is not below n goes through the network again ("cycle walking"). Walking along the cycles of a
bijection and skipping some of its points leaves a bijection of the others: of [0, n).

With b = 2^k, every other round takes two passes over an array instead of six. Both halves have at most 31 bits, so
most passes are over 32-bit words, of which a core processes twice as many at a time.

F(x) is a keyed x·m + c, m odd, then the first half of MurmurHash3's finaliser (Appleby 2011), y ← y xor y/2¹⁶
and y ← y·0x85EBCA6B, all mod 2³². The top bits of y are used. A random c makes y uniform. Without the xor, F would
be nearly linear, and adjacent indices would show it: after five rounds at any n, after seven at n = 2⁶².

*Why seven rounds.* Take two indices with the same r. The difference of their l is preserved only as long as their
r stay equal, so after 2k + 1 rounds it is preserved with probability 1/a + 1/b^k, where a random permutation has
1/a; the same holds for the r of two indices with the same l. After three rounds that is twice too often. After
five, fifty whole epochs are needed to detect it, after seven 50 n.
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
CHUNK = 1 << 15  # indices at a time: many for each NumPy call, but all arrays fit into 1 MiB of cache


@functools.lru_cache(maxsize=256)
def words(
    purpose: Literal["order", "keys", "blocks", "windows", "spares", "mixture", "packed", "in row"],
    seed: int,
    epoch: int,
) -> tuple[np.uint64, ...]:
    """Eight random words for one purpose, seed and epoch."""
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=64, person=f"feedline {purpose}".encode()).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def permuted(n: int, keys: tuple[np.uint64, ...], indices: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The permutation of [0, n), 1 ≤ n ≤ 2⁶², at these indices. `keys` are `words`."""
    if n <= FEW:
        return explicit(n, keys).take(indices.view(np.int64))
    return feistel(n, keys[:ROUNDS], indices)


def hashed(counters: NDArray[np.uint64], keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """mix(mix(counter + key₀) xor key₁), a bijection of 64-bit words.

    `mix` is SplitMix64's finaliser (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    mixed, scratch = counters + keys[0], np.empty_like(counters)
    _mix(mixed, scratch)
    mixed ^= keys[1]
    _mix(mixed, scratch)
    return mixed


def grid(n: int) -> tuple[int, int]:
    """(a, k): a grid of a rows and 2^k columns with n or more cells; fewer than 2^k of them are not needed.

    The sides differ by a factor of at most two, so at most one index in √n needs cycle walking.

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
    """The cell of each index after all rounds, a chunk at a time."""
    cells = np.empty(indices.shape, np.uint64)
    for start in range(0, indices.size, CHUNK):
        part = slice(start, start + CHUNK)
        _rounds(grid(n), keys, indices[part], None if tweaks is None else tweaks[part], cells[part])
    return cells


def _rounds(
    sides: tuple[int, int],
    keys: Sequence[np.uint64],
    indices: NDArray[np.uint64],
    tweaks: NDArray[np.uint32] | None,
    cells: NDArray[np.uint64],
) -> None:
    """Write the cells of one chunk. As a ≤ 2³¹, no sum overflows. `cells` also serves as 64-bit scratch memory."""
    (a, k), b = sides, 1 << sides[1]
    np.right_shift(indices, k, out=cells)
    left, right = cells.astype(np.uint32), indices.astype(np.uint32)
    right &= b - 1
    mixed, scratch = np.empty_like(left), np.empty_like(left)
    rows, above = _constant(a), _constant(32 - k)
    for i, key in enumerate(keys):
        _mix32(right if i % 2 else left, int(key), tweaks, mixed, scratch)
        if i % 2:
            _scale(mixed, a, cells)
            np.add(left, mixed, out=left)
            np.subtract(left, rows, out=scratch)  # where left < a, this wraps around and is the larger one
            np.minimum(left, scratch, out=left)
        else:
            np.right_shift(mixed, above, out=mixed)
            np.bitwise_xor(right, mixed, out=right)
    np.copyto(cells, left)
    cells *= b
    cells += right


def _mix32(
    x: NDArray[np.uint32],
    key: int,
    tweaks: NDArray[np.uint32] | None,
    mixed: NDArray[np.uint32],
    scratch: NDArray[np.uint32],
) -> None:
    """Write y of the module's documentation to `mixed`; m and c are the low and the high half of the key."""
    np.multiply(x, _constant(key & _LOW | 1), out=mixed)
    np.add(mixed, _constant(key >> 32), out=mixed)
    if tweaks is not None:
        np.add(mixed, tweaks, out=mixed)
    np.right_shift(mixed, _HALF, out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
    np.multiply(mixed, _MURMUR, out=mixed)


def _scale(words: NDArray[np.uint32], size: int, scratch: NDArray[np.uint64]) -> None:
    """w ↦ ⌊w · size / 2³²⌋ in place. No value is hit more often than another by more than size / 2³²."""
    np.copyto(scratch, words)
    np.multiply(scratch, np.array(size, np.uint64), out=scratch)
    np.right_shift(scratch, _WORD, out=scratch)
    np.copyto(words, scratch, casting="unsafe")


def _constant(value: int) -> NDArray[np.uint32]:
    """An array without axes, which NumPy converts in half the time that a Python number takes."""
    return np.array(value, np.uint32)


@functools.lru_cache(maxsize=64)
def explicit(n: int, keys: tuple[np.uint64, ...]) -> NDArray[np.int64]:
    """int64[n], read-only: the whole permutation, for small n. Hashes are distinct, so any sort gives the same."""
    numbers = np.argsort(hashed(np.arange(n, dtype=np.uint64), keys)).astype(np.int64)
    numbers.flags.writeable = False
    return numbers


def _mix(mixed: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, a bijection of 64-bit words, in place."""
    mixed ^= np.right_shift(mixed, 30, out=scratch)
    mixed *= 0xBF58476D1CE4E5B9
    mixed ^= np.right_shift(mixed, 27, out=scratch)
    mixed *= 0x94D049BB133111EB
    mixed ^= np.right_shift(mixed, 31, out=scratch)


_LOW = (1 << 32) - 1
_HALF, _MURMUR, _WORD = _constant(16), _constant(0x85EBCA6B), np.array(32, np.uint64)
