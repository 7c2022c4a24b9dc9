"""A trace: the records of a feed over some time, as the JSON that Perfetto and chrome://tracing read.

The format is the "Trace Event Format" of Chrome's tracing project. Times are microseconds with three decimals.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from feedline._src.listen.accounts import Accounts, Entry
from feedline._src.listen.page import written_whole
from feedline._src.order.schedule import Cursor
from feedline._src.record import BatchRecord
from feedline._src.run import Sizes
from feedline._src.version import __version__

_log = logging.getLogger("feedline")
LOOP = "training loop"
MAX_BATCHES = 50_000
"""The most batches in a trace. With two parts each: 60 MB of memory, and a file of 140 MB (14 MB compressed)."""
Event = dict[str, Any]


@contextlib.contextmanager
def traced(path: str | os.PathLike[str], sizes: Sizes, accounts: Accounts) -> Iterator[Path]:
    """The context of `Feed.trace`."""
    process, processes = jax.process_index(), jax.process_count()
    file = file_of_process(path, process, processes)
    records: collections.deque[Entry] = collections.deque(maxlen=MAX_BATCHES)

    def described(record: BatchRecord) -> Event:
        stages = sizes.at(record.step - 1)
        epoch, position = stages.access.next_cursor(Cursor(*record.before))
        nbytes = stages.placement.local_bytes
        return {"epoch": epoch, "position": position, "rows": record.rows, "bytes": nbytes}

    accounts.record_with(records.append)
    try:
        yield file
    finally:
        accounts.record_with(None)
        ended = time.perf_counter()  # after the last record, even if the loop continues meanwhile
        try:
            events = Events(
                list(records),
                ended,
                process,
                transfers=accounts.transfers(),
                described=described,
            )
            facts = {
                "feedline": __version__,
                "process": process,
                "processes": processes,
                "origin_monotonic_s": events.origin,
                "origin_unix_s": events.origin + _unix_offset_s(),
            }
            _write(file, events, facts)
        except OSError as error:
            fix = "Training goes on; free space on that disk, or choose a path on another disk, and trace again"
            _log.warning("the trace could not be written to %s: %s. %s", file, error, fix)
        except Exception:  # noqa: BLE001  a fault in a listener must not end training
            _log.exception("feedline could not write the trace %s", file)


def _unix_offset_s() -> float:
    """Unix time minus `perf_counter`, by the fastest of five readings, since a thread may be preempted in one."""
    looks = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(5)]
    before, unix, after = min(looks, key=lambda look: look[2] - look[0])
    return unix - (before + after) / 2


def file_of_process(path: str | os.PathLike[str], process: int, processes: int) -> Path:
    """The absolute path to which this process writes its trace. OSError: a file cannot be written there."""
    path = Path(path).absolute()
    if processes > 1:
        name, dot, suffixes = path.name.partition(".")
        path = path.with_name(f"{name}-process{process}{dot}{suffixes}")
    if path.exists() and not path.is_file():
        raise OSError(
            f"a trace is written to a regular file, and {path} is not one; add a name, or use another path"
        )
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise OSError(
            f"a trace is written into a folder, and {path.parent} is missing or not writable; create or chmod it"
        )
    return path


def _write(path: Path, events: Iterable[Event], facts: Mapping[str, Any]) -> None:
    """Write the file atomically, compressed if its name ends in ".gz". OSError: the file cannot be written."""
    with (
        written_whole(path) as partial,
        gzip.open(partial, "wt", compresslevel=5, encoding="utf-8")
        if path.suffix == ".gz"
        else partial.open("w", encoding="utf-8") as file,
    ):
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


@dataclasses.dataclass
class Events:
    """The events of all recorded batches. Their times count from `origin`, the earliest time in the records.

    Attributes:
      records: the oldest first.
      ended: when the trace ended, and with it the last step.
      transfers: {time at which placing began: seconds until all arrays were ready}, as far as that is known.
      described: returns what to show of a batch: where the batch begins, and its size.
    """

    records: Sequence[Entry]
    ended: float
    process: int
    transfers: Mapping[float, float]
    described: Callable[[BatchRecord], Event]

    def __post_init__(self) -> None:
        batches = [record for record in self.records if isinstance(record, BatchRecord)]
        times = (min([b.asked, b.placed.began, *(part.began for part in b.parts)]) for b in batches)
        self.origin = min(times, default=self.ended)
        threads = {part.thread for b in batches for part in b.parts} | {b.placed.thread for b in batches}
        # the numbers of tracks differ between processes, so that the files of several processes can be merged
        first = self.process * 10_000 + 1
        self._tracks = {name: number for number, name in enumerate([*sorted(threads), LOOP], start=first)}
        self._ids = itertools.count(self.process << 32)  # Perfetto accepts only integers as ids of flows

    def __iter__(self) -> Iterator[Event]:
        changes: list[tuple[float, int]] = []  # (time, change of the number of placed batches that wait)
        for record, following in itertools.zip_longest(self.records, self.records[1:]):
            if isinstance(record, BatchRecord):
                ended = following.asked if isinstance(following, BatchRecord) else following or self.ended
                yield from self._batch(record, ended)
                changes += [(_placed_at(record), 1), (record.taken, -1)]
        ready = 0
        for at, change in sorted(changes):
            ready += change
            yield self._event("C", "ready", LOOP, at, args={"batches": ready})
        yield self._event("M", "process_name", LOOP, args={"name": f"feedline, process {self.process}"})
        for track in self._tracks:
            yield self._event("M", "thread_name", track, args={"name": track})

    def _batch(self, record: BatchRecord, step_ended: float) -> Iterator[Event]:
        """The events of a batch: its parts, placing, waiting and step, with arrows between them."""
        placed, placed_at, step = record.placed, _placed_at(record), {"step": record.step}
        batch = {**step, **self.described(record)}
        placing_middle = placed.thread, (placed.began + placed_at) / 2
        for part in record.parts:
            at = part.began
            for name in ("read", "transform", "stage"):
                ended = at + getattr(part, f"{name}_s")
                if ended > at or name == "read":
                    yield self._span(name, part.thread, at, ended, step)
                at = ended
            yield from self._arrow((part.thread, part.began + part.read_s / 2), placing_middle)
        yield self._span("place", placed.thread, placed.began, placed_at, batch)
        read_at = max((part.ended for part in record.parts), default=placed.began)
        yield from self._state("read ahead", read_at, max(read_at, placed.began), step)
        ready_s = self.transfers.get(placed.began)
        if ready_s is not None and ready_s > placed.place_s:
            yield from self._state("transfer", placed.began, placed.began + ready_s, step)
        yield from self._state("ready", placed_at, record.taken, step)
        yield self._span("wait", LOOP, record.asked, record.taken, batch)
        yield self._span("step", LOOP, record.taken, step_ended, batch)
        yield from self._arrow(placing_middle, (LOOP, (record.taken + step_ended) / 2))

    def _span(self, name: str, track: str, began: float, ended: float, args: Event) -> Event:
        """A span: a thread worked from `began` to `ended`."""
        duration_us = round(self._us(ended) - self._us(began), 3)
        return self._event("X", name, track, began, dur=duration_us, args=args)

    def _state(self, name: str, began: float, ended: float, args: Event) -> Iterator[Event]:
        """A state of a batch. Unlike spans, states of several batches may overlap."""
        local = {"local": hex(next(self._ids))}  # each state has a track of its own, in this process
        yield self._event("b", name, LOOP, began, id2=local, args=args)
        yield self._event("e", name, LOOP, ended, id2=local, args=args)

    def _arrow(self, tail: tuple[str, float], head: tuple[str, float]) -> Iterator[Event]:
        """An arrow between two spans. `tail` and `head`: the track of a span, and a time inside the span."""
        number = next(self._ids)
        yield self._event("s", "batch", *tail, id=number)
        yield self._event("f", "batch", *head, id=number, bp="e")

    def _event(self, phase: str, name: str, track: str, at: float | None = None, **more: Any) -> Event:
        when = {} if at is None else {"ts": self._us(at)}
        where = {"pid": self.process, "tid": self._tracks[track]}
        return {"ph": phase, "cat": "feedline", "name": name, **where, **when, **more}

    def _us(self, at: float) -> float:
        return round((at - self.origin) * 1e9) / 1000


def _placed_at(record: BatchRecord) -> float:
    """When placing the batch ended."""
    return min(record.taken, record.placed.began + record.placed.place_s)
