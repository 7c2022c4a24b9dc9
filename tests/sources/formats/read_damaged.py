"""Reads damaged copies of a file, and prints what became of each: run by test_damage.py, since a copy may end it.

Arguments: the file, and how many random copies. It prints a line for each copy: its number, then "read" and the
number of rows, or the error's type and message.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import feedline
from feedline._src.sources.encoded.records import is_encoded_source

_WORDS = (-1, -(1 << 63), 1 << 62, 1 << 31, 0, 7)


def damaged(whole: bytes, count: int) -> Iterator[bytes]:
    """Copies with each aligned word replaced in turn, then with random bytes changed, then cut."""
    for start in range(0, len(whole) - 7, 8):
        for word in _WORDS:
            yield whole[:start] + word.to_bytes(8, "little", signed=True) + whole[start + 8 :]
    random = np.random.default_rng(0)
    for _ in range(count):
        copy = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            copy[place] = random.integers(0, 256)
        yield bytes(copy)
    for length in random.integers(0, len(whole), count // 4):
        yield whole[:length]


def read(path: Path) -> str:
    """What becomes of reading all rows, or the first thousand."""
    try:
        source = feedline.open_source(path)
        rows = np.arange(min(len(source), 1000))
        if is_encoded_source(source):  # the damage made a type one of bytes
            return f"read {len(source.records(rows))}"
        if max(int(np.prod(leaf.shape)) for leaf in source.spec.values()) > 1 << 20:
            return f"read {len(source)}"  # nothing: metadata may promise rows that no memory holds
        out = {name: np.empty((len(rows), *leaf.shape), leaf.dtype) for name, leaf in source.spec.items()}
        source.read(rows, out)
        whole = path.read_bytes()
        for row in out.get("bytes", ()) if path.suffix == ".arrow" else ():
            assert row.tobytes() in whole, "a row that is not in the file"
    except Exception as error:  # noqa: BLE001  # of any type: the test judges it
        return f"{type(error).__name__} {error}".replace("\n", " ").replace(str(path), "PATH")
    return f"read {len(source)}"


if __name__ == "__main__":
    good = Path(sys.argv[1])
    path = good.with_name(f"damaged{good.suffix}")
    for number, copy in enumerate(damaged(good.read_bytes(), int(sys.argv[2]))):
        print(number, end=" ", flush=True)
        path.write_bytes(copy)
        print(read(path), flush=True)
        path.unlink()
