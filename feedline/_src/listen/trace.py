"""A trace: the records of a feed for some time, as the JSON that Perfetto and chrome://tracing read.

The format: "Trace Event Format" of Chrome's tracing project. Its times are microseconds; here with three decimals.
"""

from __future__ import annotations

import collections
import contextlib
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
from feedline._src.order.schedule import Cursor
from feedline._src.record import BatchRecord
from feedline._src.run import Stages
from feedline._src.version import __version__

_log = logging.getLogger("feedline")
LOOP = "training loop"
MAX_BATCHES = 50_000
"""Batches that a trace holds: of two parts each 60 MB of memory, 140 MB of file, or 14 MB compressed."""
Event = dict[str, Any]
Records = collections.deque[Entry]
"""The oldest first."""
Where = tuple[str, float, float]
"""A thread, and from when to when."""


@contextlib.contextmanager
def traced(path: str | os.PathLike[str], stages: Stages, accounts: Accounts) -> Iterator[Path]:
    """The context of `Feed.trace`."""
    process, processes = jax.process_index(), jax.process_count()
    file = file_of_process(path, process, processes)
    records, kept, began = Records(maxlen=MAX_BATCHES), 0, time.perf_counter()

    def keep(record: Entry) -> None:
        nonlocal kept
        kept += 1
        records.append(record)

    accounts.keep_with(keep)
    try:
        yield file
    finally:
        ended = time.perf_counter()
        accounts.keep_with(None)
        try:
            events = Events(
                records,
                (began, ended),
                process,
                "feedline" if processes == 1 else f"feedline, process {process} of {processes}",
                transfers=accounts.transfers(),
                begins=lambda before: stages.access.next_cursor(Cursor(*before)),
                nbytes=stages.placement.local_bytes,
            )
            facts = {
                "feedline": __version__,
                "process": process,
                "processes": processes,
                "batches_left_out": kept - len(records),
                "origin_monotonic_s": events.origin,
                "origin_unix_s": time.time() - (time.perf_counter() - events.origin),
            }
            write_trace(file, events, facts)
        except OSError as error:
            _log.warning(
                "the trace could not be written to %s: %s. Training goes on; free that disk, or choose a path on "
                "another one, and trace again",
                file,
                error,
            )
        except Exception:  # noqa: BLE001  a fault in what only listens must not end training
            _log.exception("feedline could not write the trace %s", file)


def file_of_process(path: str | os.PathLike[str], process: int, processes: int) -> Path:
    """The absolute path to which this process writes its trace. OSError: a file cannot be written there."""
    path = Path(path).absolute()
    if processes > 1:
        name, dot, suffixes = path.name.partition(".")
        path = path.with_name(f"{name}-process{process}{dot}{suffixes}")
    if path.exists() and not path.is_file():
        raise OSError(f"a trace is written to a regular file, and {path} is none; add a name, or use another")
    if not os.access(path.parent, os.W_OK):
        raise OSError(
            f"a trace is written into a folder, and {path.parent} is missing or not writable; make it so"
        )
    return path


def write_trace(path: Path, events: Iterable[Event], facts: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all; compressed if it ends in ".gz". OSError: it could not be written."""
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
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


class Events:
    """The events of all batches that were recorded. The earliest time in the records, `origin`, is 0.

    Args:
      span: when the trace began and ended: the end of the last step.
      transfers: when placing began → the seconds until all arrays were ready, where that is known.
      begins: where a batch begins, from the place after the one before.
      nbytes: of the process-local part of a batch.
    """

    def __init__(
        self,
        records: Records,
        span: tuple[float, float],
        process: int,
        title: str,
        *,
        transfers: Mapping[float, float],
        begins: Callable[[tuple[int, int]], Sequence[int]],
        nbytes: int,
    ) -> None:
        self._records = list(records)
        self._process, self._title = process, title
        self._transfers, self._begins, self._nbytes = transfers, begins, nbytes
        began, self._ended = span
        batches = [record for record in records if isinstance(record, BatchRecord)]
        times = (min([b.asked, b.placed.began, *(part.began for part in b.parts)]) for b in batches)
        self.origin = min(times, default=began)
        threads = {part.thread for b in batches for part in b.parts} | {b.placed.thread for b in batches}
        # numbers that differ between processes, so that files of several can be merged
        self._tracks = {name: process * 10_000 + n for n, name in enumerate([*sorted(threads), LOOP], start=1)}
        self._ids = itertools.count(process << 32)  # Perfetto refuses flows whose id is no integer

    def __iter__(self) -> Iterator[Event]:
        changes: list[tuple[float, int]] = []  # of the number of placed batches that wait
        for record, following in itertools.zip_longest(self._records, self._records[1:]):
            if isinstance(record, BatchRecord):
                ended = following.asked if isinstance(following, BatchRecord) else following or self._ended
                yield from self._batch(record, ended)
                changes += [(_placed_at(record), 1), (record.taken, -1)]
        count = 0
        for at, change in sorted(changes):
            count += change
            yield self._event("C", "ready", LOOP, at, args={"batches": count})
        yield self._event("M", "process_name", LOOP, args={"name": self._title})
        for track in self._tracks:
            yield self._event("M", "thread_name", track, args={"name": track})

    def _batch(self, record: BatchRecord, ended: float) -> Iterator[Event]:
        """Events of a batch: its parts, placing, waiting and step, with arrows from one to the next."""
        placed, step = record.placed, {"step": record.step}
        epoch, position = self._begins(record.before)
        whole = {**step, "epoch": epoch, "position": position, "rows": record.rows, "bytes": self._nbytes}
        place = placed.thread, placed.began, _placed_at(record)
        taken = LOOP, record.taken, ended
        for part in record.parts:
            at = part.began
            for stage, seconds in (
                ("read", part.read_s),
                ("transform", part.transform_s),
                ("stage", part.stage_s),
            ):
                if seconds or stage == "read":
                    yield self._span(stage, (part.thread, at, at + seconds), step)
                    at += seconds
            yield from self._arrow((part.thread, part.began, part.began + part.read_s), place)
        yield self._span("place", place, whole)
        read = max((part.ended for part in record.parts), default=placed.began)
        yield from self._state("read ahead", read, max(read, placed.began), step)
        ready_s = self._transfers.get(placed.began)
        if ready_s is not None and ready_s > placed.place_s:
            yield from self._state("transfer", placed.began, placed.began + ready_s, step)
        yield from self._state("ready", _placed_at(record), record.taken, step)
        yield self._span("wait", (LOOP, record.asked, record.taken), whole)
        yield self._span("step", taken, whole)
        yield from self._arrow(place, taken)

    def _span(self, stage: str, where: Where, args: Event) -> Event:
        """Work of a thread."""
        track, began, ended = where
        duration = (self._ns(ended) - self._ns(began)) / 1000
        return self._event("X", stage, track, began, dur=duration, args=args)

    def _state(self, name: str, began: float, ended: float, args: Event) -> Iterator[Event]:
        """A state of a batch, which may overlap that of other batches."""
        local = {"local": hex(next(self._ids))}  # a track of this process
        for phase, at in (("b", began), ("e", ended)):
            yield self._event(phase, name, LOOP, at, id2=local, args=args)

    def _arrow(self, *spans: Where) -> Iterator[Event]:
        """An arrow from the first of two spans to the second, bound to the middle of each."""
        number = next(self._ids)
        for (track, began, ended), more in zip(spans, ({"ph": "s"}, {"ph": "f", "bp": "e"}), strict=True):
            yield {**self._event("", "batch", track, (began + ended) / 2, id=number), **more}

    def _event(self, phase: str, name: str, track: str, at: float | None = None, **more: Any) -> Event:
        when = {} if at is None else {"ts": self._ns(at) / 1000}
        where = {"pid": self._process, "tid": self._tracks[track]}
        return {"ph": phase, "cat": "feedline", "name": name, **where, **when, **more}

    def _ns(self, at: float) -> int:
        return round((at - self.origin) * 1e9)


def _placed_at(record: BatchRecord) -> float:
    """When it was placed."""
    return min(record.taken, record.placed.began + record.placed.place_s)
