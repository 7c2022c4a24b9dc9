"""Mutations of files and of states, for `fuzz.py`."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Change = Callable[[bytes, random.Random], bytes]
_METADATA = ("zarr.json", ".zarray", ".zgroup", "_METADATA", "_CHECKPOINT_METADATA")
NUMBERS = (
    b"0", b"-1", b"1", b"7", b"255", b"65536", b"2147483648", b"1099511627776", b"9223372036854775807", b"1e3",
    b"10" * 20, b"4.5", b"null", b"true", b'"x"', b"[]",
)  # fmt: skip
WORDS = (
    b"<i4", b"<f8", b"|S0", b"|V0", b"|V2", b"|O", b"<U4", b"bool", b"complex64", b"float99", b"'''", b"(", b"{}",
)  # fmt: skip
VALUES = (
    None, -1, 0, 1, 3, 2**31, 2**63, 2**70, 1.5, float("nan"), True, "x", "", [], {}, [None], {"x": 1},
)  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one to four changes, half of them near an end, where headers and footers are."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = chance.choice(_CHANGES)(data, chance)
    return data


def _random_offset(data: bytes, chance: random.Random) -> int:
    near = min(len(data), 400)
    where = chance.random()
    if where < 0.25:
        return chance.randrange(near + 1)
    return len(data) - chance.randrange(near + 1) if where < 0.5 else chance.randrange(len(data) + 1)


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        if changed:
            changed[min(_random_offset(data, chance), len(data) - 1)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwritten(data: bytes, chance: random.Random) -> bytes:
    at, size = _random_offset(data, chance), chance.choice((1, 2, 4, 8, 64))
    number = chance.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, chance.getrandbits(8 * size)))
    return data[:at] + number.to_bytes(size, chance.choice(("little", "big"))) + data[at + size :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    at = _random_offset(data, chance)
    return data[:at] + data[at + chance.choice((1, 4, 100)) :]


def _inserted(data: bytes, chance: random.Random) -> bytes:
    at, start = _random_offset(data, chance), _random_offset(data, chance)
    return data[:at] + data[start : start + chance.choice((1, 4, 100))] + data[at:]


def _truncated(data: bytes, chance: random.Random) -> bytes:
    return data[: _random_offset(data, chance)]


def _numbered(data: bytes, chance: random.Random) -> bytes:
    """Replace a decimal number, such as those in headers of .npy and Zarr."""
    digits = [i for i, byte in enumerate(data[:2000]) if 48 <= byte < 58]
    if not digits:
        return _overwritten(data, chance)
    start = end = chance.choice(digits)
    while start > 0 and 48 <= data[start - 1] < 58:
        start -= 1
    while end < len(data) and 48 <= data[end] < 58:
        end += 1
    same_length = "".join(chance.choices("123456789", k=end - start)).encode()  # the header keeps its length
    return data[:start] + chance.choice((same_length, chance.choice(NUMBERS))) + data[end:]


def _worded(data: bytes, chance: random.Random) -> bytes:
    """Write one of `WORDS` over bytes of the header."""
    at = _random_offset(data[:400], chance)
    word = chance.choice(WORDS)
    return data[:at] + word + data[at + len(word) :]


def _zeroed(data: bytes, chance: random.Random) -> bytes:
    """Write zeros over some bytes, as a disk or a file system does in a crash."""
    at = _random_offset(data, chance)
    size = min(chance.choice((8, 64, 512, 4096)), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def _swapped(data: bytes, chance: random.Random) -> bytes:
    """Exchange two blocks."""
    size = chance.choice((8, 64, 512))
    first, second = sorted((_random_offset(data, chance), _random_offset(data, chance)))
    if second - first < size:
        return data
    one, two = data[first : first + size], data[second : second + size]
    return data[:first] + two + data[first + size : second] + one + data[second + size :]


def _appended(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.choice((1, 8, 512, 10_000)))


_CHANGES = (
    _flipped, _overwritten, _cut, _inserted, _truncated, _numbered, _numbered, _worded, _zeroed, _swapped,
    _appended,
)  # fmt: skip


def write_mutated(path: Path, valid: Path, chance: random.Random, change: Change = mutated) -> None:
    """Write a mutation of a file; in a folder, mutate or remove one or two of its files."""
    if valid.is_file():
        path.write_bytes(change(valid.read_bytes(), chance))
        return
    shutil.copytree(valid, path, copy_function=_linked)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    metadata = [file for file in files if file.name in _METADATA]
    for _ in range(chance.choice((1, 1, 2))):
        file = chance.choice(metadata if metadata and chance.random() < 0.6 else files)
        if not file.exists():
            continue
        data = file.read_bytes()
        file.unlink()  # it is a link to the valid file
        if chance.random() >= 0.1:
            file.write_bytes((mutated_json if chance.random() < 0.5 else change)(data, chance))


def _linked(source: str, target: str) -> None:
    """Link to a file, which is faster than a copy; to another disk, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def mutated_json(data: bytes, chance: random.Random) -> bytes:
    """Change values in one line of JSON; if that line is no JSON, mutate the bytes by `mutated`."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return mutated(data, chance)
    if chance.random() < 0.05:
        lines[at] = chance.choice((b"[" * 100_000, b'{"x":' * 50_000, b"1" * 5000, b"1e999", b"NaN"))
    else:
        lines[at] = json.dumps(mutated_state([value], chance)).encode()
        if chance.random() < 0.9:
            lines[at] = lines[at][1:-1]  # else the value is in a list
    return b"\n".join(lines)


def mutated_state(state: Any, chance: random.Random) -> Any:
    """A state with one to three values replaced, removed or added, anywhere in it."""
    state = copy.deepcopy(state)
    for _ in range(chance.choice((1, 1, 2, 3))):
        containers = list(_containers(state))
        container = chance.choice(containers)
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = chance.choice(keys) if keys else "x"
        change, value = chance.random(), copy.deepcopy(chance.choice(VALUES))
        if change < 0.2 and keys:
            del container[key]
        elif isinstance(container, list):
            container.append(value)
        elif change < 0.3:
            container[chance.choice(("x", "7", "lanes", "next_index"))] = value
        else:
            container[key] = value
    return state


def _containers(value: Any) -> Iterator[Any]:
    """All dicts and lists in a JSON value, from the outside inwards."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)
