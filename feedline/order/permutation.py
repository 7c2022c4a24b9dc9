"""A keyed permutation of [0, n) for any n up to 2⁶²: any places of it at once, in O(1) memory.

*Keys.* BLAKE2b (RFC 7693) makes eight 64-bit words out of (purpose, seed, epoch). No two of these triples
share words, whereas with seed + epoch as the key, epoch 1 of seed 0 would repeat epoch 0 of seed 1.

*Few*, n ≤ 4096. The permutation is explicit: the numbers, sorted by a 64-bit hash.

*Many.* A Feistel network on the grid Z_a × [0, b) with a·b ≥ n (Black & Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). Place p is the cell (l, r) = (p div b, p mod b); the rounds take turns at

    r ← r xor F₁(l),    l ← l + F₂(r) mod a,    r ← r xor F₃(l),    …

and the last cell is the number l·b + r. A round can be undone whatever F is, so this is a bijection of the
grid. A cell that is no number, l·b + r ≥ n, goes through the network again ("cycle walking"). Walking along
the cycles of a bijection and skipping some of its points leaves a bijection of the others: of [0, n).

b = 2^k makes every other round two passes over an array in place of six. Both halves have 31 bits at the
most, so that most passes are over 32-bit words, which a core does twice as many of at a time.

F(x) is a keyed x·m + c, m odd, then the first half of MurmurHash3's finaliser (Appleby 2011), y ← y xor y/2¹⁶
and y ← y·0x85EBCA6B, all mod 2³²; of y the top bits are taken. A random c makes y uniform. Without the xor F
would be nearly linear, and adjacent places show it: after five rounds at any n, after seven at n = 2⁶².

*Why seven rounds.* Take two places that share r. Only while they still share it do their l keep the difference
they had, so after 2k + 1 rounds they have it with probability 1/a + 1/b^k, where chance alone gives 1/a; the
same goes for the r of two that share l. After three rounds that is twice as often as it should be. After five it
takes fifty whole epochs to notice, after seven 50 n.
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
CHUNK = 1 << 15  # places at a time: many for each NumPy call, but all arrays of them stay in a MiB of cache


@functools.lru_cache(maxsize=64)
def words(
    purpose: Literal["order", "keys", "blocks", "windows", "spares"], seed: int, epoch: int
) -> tuple[np.uint64, ...]:
    """Eight random words for one purpose, seed and epoch."""
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=64, person=f"feedline {purpose}".encode()).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def permuted(n: int, keys: tuple[np.uint64, ...], places: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The numbers at these places of the permutation of [0, n), 1 ≤ n ≤ 2⁶². `keys` are `words`."""
    if n <= FEW:
        return explicit(n, keys).take(places.view(np.int64))
    return feistel(n, keys[:ROUNDS], places)


def hashed(counters: NDArray[np.uint64], keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """mix(mix(counter + key₀) xor key₁), a bijection of 64-bit words.

    `mix` is SplitMix64's finaliser (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    mixed, spare = counters + keys[0], np.empty_like(counters)
    _mix(mixed, spare)
    mixed ^= keys[1]
    _mix(mixed, spare)
    return mixed


def grid(n: int) -> tuple[int, int]:
    """(a, k): a grid of a rows and 2^k columns with a·2^k ≥ n ≥ 1 cells, fewer than 2^k of them too many.

    The sides differ by a factor of two at the most, so one place in √n, or fewer, has to walk.

    Example:
      >>> grid(10**6), grid(2**20 + 1)
      ((977, 10), (1025, 10))
    """
    k = (n - 1).bit_length() // 2
    return -(-n >> k), k


def feistel(
    n: int, keys: Sequence[np.uint64], places: NDArray[np.uint64], tweaks: NDArray[np.uint32] | None = None
) -> NDArray[np.int64]:
    """The network's permutation of [0, n) at these places, with one round for each key.

    `tweaks`, random words, one for each place: places with different tweaks are of different permutations.
    """
    numbers = _cells(n, keys, places, tweaks)
    beyond = np.flatnonzero(numbers >= n)
    while beyond.size:
        walked = _cells(n, keys, numbers[beyond], None if tweaks is None else tweaks[beyond])
        numbers[beyond] = walked
        beyond = beyond[walked >= n]
    return numbers.view(np.int64)


def _cells(
    n: int, keys: Sequence[np.uint64], places: NDArray[np.uint64], tweaks: NDArray[np.uint32] | None
) -> NDArray[np.uint64]:
    """The cell of each place after all rounds, a chunk at a time."""
    cells = np.empty(places.shape, np.uint64)
    for start in range(0, places.size, CHUNK):
        part = slice(start, start + CHUNK)
        _rounds(grid(n), keys, places[part], None if tweaks is None else tweaks[part], cells[part])
    return cells


def _rounds(
    sides: tuple[int, int],
    keys: Sequence[np.uint64],
    places: NDArray[np.uint64],
    tweaks: NDArray[np.uint32] | None,
    cells: NDArray[np.uint64],
) -> None:
    """Write the cells of one chunk. As a ≤ 2³¹, no sum overflows. `cells` is the 64-bit scratch as well."""
    (a, k), b = sides, 1 << sides[1]
    np.right_shift(places, k, out=cells)
    left, right = cells.astype(np.uint32), places.astype(np.uint32)
    right &= b - 1
    mixed, spare = np.empty_like(left), np.empty_like(left)
    rows, above = _constant(a), _constant(32 - k)
    for turn, key in enumerate(keys):
        _mix32(right if turn % 2 else left, int(key), tweaks, mixed, spare)
        if turn % 2:
            _scale(mixed, a, cells)
            np.add(left, mixed, out=left)
            np.subtract(left, rows, out=spare)  # where left < a, this wraps around and is the greater
            np.minimum(left, spare, out=left)
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
    spare: NDArray[np.uint32],
) -> None:
    """y of the module's documentation, into `mixed`: m and c are the low and the high half of the key."""
    np.multiply(x, _constant(key & _LOW | 1), out=mixed)
    np.add(mixed, _constant(key >> 32), out=mixed)
    if tweaks is not None:
        np.add(mixed, tweaks, out=mixed)
    np.right_shift(mixed, _HALF, out=spare)
    np.bitwise_xor(mixed, spare, out=mixed)
    np.multiply(mixed, _MURMUR, out=mixed)


def _scale(words: NDArray[np.uint32], size: int, scratch: NDArray[np.uint64]) -> None:
    """w ↦ ⌊w · size / 2³²⌋ in place. No value is hit more often than another by more than size / 2³²."""
    np.copyto(scratch, words)
    np.multiply(scratch, np.array(size, np.uint64), out=scratch)
    np.right_shift(scratch, _WORD, out=scratch)
    np.copyto(words, scratch, casting="unsafe")


def _constant(value: int) -> NDArray[np.uint32]:
    """An array without axes: NumPy takes these up in half the time that a Python number needs."""
    return np.array(value, np.uint32)


@functools.lru_cache(maxsize=16)
def explicit(n: int, keys: tuple[np.uint64, ...]) -> NDArray[np.int64]:
    """int64[n], read-only: the permutation of few numbers. Hashes are distinct, so every way of sorting agrees."""
    numbers = np.argsort(hashed(np.arange(n, dtype=np.uint64), keys)).astype(np.int64)
    numbers.flags.writeable = False
    return numbers


def _mix(mixed: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, a bijection of 64-bit words, in place."""
    mixed ^= np.right_shift(mixed, 30, out=spare)
    mixed *= 0xBF58476D1CE4E5B9
    mixed ^= np.right_shift(mixed, 27, out=spare)
    mixed *= 0x94D049BB133111EB
    mixed ^= np.right_shift(mixed, 31, out=spare)


_LOW = (1 << 32) - 1
_HALF, _MURMUR, _WORD = _constant(16), _constant(0x85EBCA6B), np.array(32, np.uint64)
