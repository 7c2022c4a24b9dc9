"""Where the live buffers of JAX were allocated: the places in the user's code, from JAX's own memory profile.

JAX writes that profile in the format of pprof, as messages of Protocol Buffers. A few of their fields are read
here, by the numbers in https://github.com/google/pprof/blob/main/proto/profile.proto.
"""

from __future__ import annotations

import collections
import gzip
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

Places = collections.Counter["Place"]


class Place(NamedTuple):
    """A line of code.

    Attributes:
      function, file, line: of the innermost frame that is neither JAX's nor feedline's.
    """

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        """Example: train_step (train.py:41)."""
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


def live_buffers() -> Places:
    """How many buffers are alive that were allocated at each place: of an array, one on each device.

    Empty where the backend does not keep such a profile. Buffers that only JAX or feedline allocated are left out.

    Example:
      >>> before = live_buffers()
      >>> x = jax.numpy.zeros(7) + 1
      >>> sum((live_buffers() - before).values()) > 0
      True
    """
    try:
        return _buffers_in(gzip.decompress(jax.profiler.device_memory_profile()))
    except (jax.errors.JaxRuntimeError, LookupError, ValueError, OSError):  # no profile, or of another format
        return collections.Counter()


def _buffers_in(profile: bytes) -> Places:
    """How many buffers a profile has of each place. Those without a frame of the user's are left out."""
    texts: list[str] = []
    functions: dict[int, dict[int, Any]] = {}
    locations: dict[int, list[dict[int, Any]]] = {}  # a location has a line for each inlined function
    samples = []
    for number, value in _fields(profile):
        if number == 6:
            texts.append(value.decode())
        elif number == 5:
            function = dict(_fields(value))
            functions[function[1]] = function
        elif number == 4:
            parts = list(_fields(value))
            locations[dict(parts)[1]] = [dict(_fields(line)) for part, line in parts if part == 4]
        elif number == 2:
            samples.append(list(_fields(value)))
    places: Places = collections.Counter()
    for sample in samples:
        labels = [dict(_fields(value)) for number, value in sample if number == 3]
        if not any(texts[label.get(2, 0)] == "buffer" for label in labels):
            continue  # a compiled program
        stack = [line for at in _numbers(sample, 1) for line in locations[at]]
        frames = (
            Place(texts[functions[line[1]].get(2, 0)], texts[functions[line[1]].get(4, 0)], line.get(2, 0))
            for line in stack
        )
        place = next((frame for frame in frames if not frame.file.startswith(_NOT_THE_USERS)), None)
        if place is not None:
            places[place] += _numbers(sample, 2)[0]
    return places


_PACKAGES = (*(Path(jax.__file__).parent.with_name(name) for name in ("jax", "jaxlib")), Path(__file__).parents[2])
_NOT_THE_USERS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), threading.__file__)


def _numbers(message: list[tuple[int, Any]], number: int) -> list[int]:
    """All integers of a repeated field, which may be packed."""
    found: list[int] = []
    for each, value in message:
        if each == number:
            found += [value] if isinstance(value, int) else _unpacked(value)
    return found


def _unpacked(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: an integer, or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, at = _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(integer, where the next field begins): seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
