"""A trace: the records of a feed for some time, as the JSON that Perfetto and chrome://tracing read.

The format: "Trace Event Format" of Chrome's tracing project. Its times are microseconds; here with three decimals.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from feedline._src.record import BatchRecord

LOOP = "training loop"
Event = dict[str, Any]
MOST_PARTS = 100_000
"""Parts of batches that a trace holds: 60 MB of memory, 140 MB of file, or 14 MB compressed, written in 8 s."""


class Recording:
    """The latest records of a feed, of which `MOST_PARTS` parts are kept. One thread at a time calls `keep`.

    Attributes:
      records: the oldest first.
      left_out: how many batches before them were not kept.
    """

    def __init__(self) -> None:
        self.records: collections.deque[BatchRecord | float] = collections.deque()
        self.left_out = 0
        self._parts = 0  # of `records`

    def keep(self, record: BatchRecord | float) -> None:
        """Keep one more record, and let go of the oldest ones where there are too many."""
        self.records.append(record)
        self._parts += _parts_in(record)
        while self._parts > MOST_PARTS and len(self.records) > 1:
            oldest = self.records.popleft()
            self._parts -= _parts_in(oldest)
            self.left_out += isinstance(oldest, BatchRecord)


def _parts_in(record: BatchRecord | float) -> int:
    return max(1, len(record.parts)) if isinstance(record, BatchRecord) else 1


def file_of_process(path: str | os.PathLike[str], process: int, processes: int) -> Path:
    """The absolute path to which this process writes its trace.

    Raises:
      OSError: it is a folder or no regular file, or its folder is missing or not writable.
    """
    path = Path(path).absolute()
    if processes > 1:
        name, dot, suffixes = path.name.partition(".")
        path = path.with_name(f"{name}-process{process}{dot}{suffixes}")
    if path.is_dir():
        raise IsADirectoryError(f"a trace is written to a file, and {path} is a folder; add a name to it")
    if path.exists() and not path.is_file():
        raise OSError(f"a trace is written to a regular file, and {path} is none; use another name")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"a trace is written into a folder that exists, and {path.parent} does not; create it before"
        )
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"a trace is written into a folder with permission to write, and {path.parent} gives none; use another"
        )
    return path


def write_trace(path: Path, events: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all; compressed if it ends in ".gz".

    Args:
      facts: about the whole trace.

    Raises:
      OSError: it could not be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with (
            gzip.open(partial, "wt", compresslevel=5, encoding="utf-8")
            if path.suffix == ".gz"
            else partial.open("w", encoding="utf-8")
        ) as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def origin_of(records: Iterable[BatchRecord | float], default: float) -> float:
    """The earliest time in the records; `default` if there is no batch."""
    times = (
        min([each.asked, each.placed.began, *(part.began for part in each.parts)]) for each in _batches(records)
    )
    return min(times, default=default)


def tracks_of(records: Iterable[BatchRecord | float]) -> list[str]:
    """The threads as they are shown: those that read, the one that places, the training loop."""
    batches = _batches(records)
    threads = {part.thread for batch in batches for part in batch.parts} | {each.placed.thread for each in batches}
    return [*sorted(threads, key=_rank), LOOP]


def trace_events(
    records: Sequence[BatchRecord | float],
    ended: float,
    events: Events,
    *,
    transfers: Mapping[float, float],
    begins: Callable[[tuple[int, int]], tuple[int, int]],
    nbytes: int,
) -> Iterator[Event]:
    """The events of all batches, and the names of their tracks.

    Args:
      records: in order; a number is when the loop ended or a break came.
      ended: when the trace ended: the end of the last step.
      events: makes the events.
      transfers: when placing began → the seconds until all arrays were ready, where that is known.
      begins: where a batch begins, from the place after the one before.
      nbytes: of the process-local part of a batch.
    """
    ready: list[tuple[float, int]] = []
    for record, following in itertools.zip_longest(records, records[1:]):
        if not isinstance(record, BatchRecord):
            continue
        epoch, position = begins(record.before)
        whole = {
            "step": record.step, "epoch": epoch, "position": position, "rows": record.rows, "bytes": nbytes,
        }  # fmt: skip
        left = following.asked if isinstance(following, BatchRecord) else following or ended
        yield from _made(record, events, whole, transfers.get(record.placed.began))
        yield from events.span(LOOP, "wait", record.asked, record.taken, whole)
        yield from events.span(LOOP, "step", record.taken, left, whole)
        yield from events.flow((record.placed.thread, *_placing(record)), (LOOP, record.taken, left))
        ready += [(_placing(record)[1], 1), (record.taken, -1)]
    yield from events.counter("ready", ready)
    yield from events.names()


def _placing(record: BatchRecord) -> tuple[float, float]:
    return record.placed.began, min(record.taken, record.placed.began + record.placed.place_s)


def _made(record: BatchRecord, events: Events, whole: Event, ready_s: float | None) -> Iterator[Event]:
    """How a batch was read, placed, and waited twice: in host memory, and on the devices."""
    placed, parts = record.placed, record.parts
    began, put = _placing(record)
    for part in parts:
        at = part.began
        for stage, seconds in (("read", part.read_s), ("transform", part.transform_s), ("stage", part.stage_s)):
            if seconds or stage == "read":
                yield from events.span(part.thread, stage, at, at + seconds, {"step": record.step})
                at += seconds
        yield from events.flow(
            (part.thread, part.began, part.began + part.read_s),
            (placed.thread, began, put),
        )
    yield from events.span(placed.thread, "place", began, put, whole)
    read = max((part.ended for part in parts), default=began)
    args = {"step": record.step}
    yield from events.apart("read ahead", read, max(read, began), args)
    if ready_s is not None and ready_s > placed.place_s:
        yield from events.apart("transfer", began, began + ready_s, args)
    yield from events.apart("ready", put, record.taken, args)


class Events:
    """Makes the events of one process.

    Args:
      tracks: the names of its threads, the training loop's among them.
      origin: the time that is 0, in seconds as all times here.
      process: its index; the events have it as their process.
      title: the name of the process.
    """

    def __init__(self, tracks: Sequence[str], origin: float, process: int, title: str) -> None:
        self._origin = origin
        self._process = process
        self._title = title
        # numbers that differ between processes, so that files of several can be merged
        self._tracks = {track: process * 10_000 + number for number, track in enumerate(tracks, start=1)}
        self._ids = itertools.count(process << 32)  # Perfetto refuses flows whose id is no integer

    def span(self, track: str, stage: str, began: float, ended: float, args: Event) -> Iterator[Event]:
        """Work of a thread."""
        first, last = self._ns(began), self._ns(ended)
        yield self._event("X", stage, first, track, dur=(last - first) / 1000, args=args)

    def apart(self, stage: str, began: float, ended: float, args: Event) -> Iterator[Event]:
        """A state of a batch, which is no work of a thread and may overlap that of other batches."""
        same: Event = {"id2": {"local": hex(next(self._ids))}, "args": args}  # local: a track of this process
        yield self._event("b", stage, self._ns(began), **same)
        yield self._event("e", stage, self._ns(ended), **same)

    def flow(self, *spans: tuple[str, float, float]) -> Iterator[Event]:
        """An arrow from the first of two spans to the second: (track, began, ended)."""
        number = next(self._ids)
        for phase, (track, began, ended) in zip("sf", spans, strict=True):
            middle = (self._ns(began) + self._ns(ended)) // 2  # within the span, and so bound to it
            more = {"bp": "e"} if phase == "f" else {}
            yield self._event(phase, "batch", middle, track, id=number, **more)

    def counter(self, name: str, changes: Iterable[tuple[float, int]]) -> Iterator[Event]:
        """A number over time, from its changes."""
        count = 0
        for at, change in sorted(changes):
            count += change
            yield self._event("C", name, self._ns(at), args={"batches": count})

    def note(self, text: str) -> Iterator[Event]:
        """A mark at the beginning."""
        yield self._event("i", text, 0, s="p")

    def names(self) -> Iterator[Event]:
        """The names of the process and of its tracks."""
        yield self._event("M", "process_name", args={"name": self._title})
        for track in self._tracks:
            yield self._event("M", "thread_name", track=track, args={"name": track})

    def _event(self, phase: str, name: str, ns: int | None = None, track: str = LOOP, **more: Any) -> Event:
        at = {} if ns is None else {"ts": ns / 1000}
        where = {"pid": self._process, "tid": self._tracks[track]}
        return {"ph": phase, "cat": "feedline", "name": name, **where, **at, **more}

    def _ns(self, at: float) -> int:
        return round((at - self._origin) * 1e9)


def _batches(records: Iterable[BatchRecord | float]) -> list[BatchRecord]:
    return [record for record in records if isinstance(record, BatchRecord)]


def _rank(thread: str) -> tuple[Any, ...]:
    """Sorts feedline-read-2 before feedline-read-10, and the placing thread after both."""
    return "place" in thread, [int(word) for word in re.findall(r"\d+", thread)], thread
