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
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from feedline._src.listen.accounts import Accounts
from feedline._src.order.schedule import Cursor
from feedline._src.record import BatchRecord
from feedline._src.run import Stages
from feedline._src.version import __version__

_log = logging.getLogger("feedline")
LOOP = "training loop"
MAX_BATCHES = 50_000
"""Batches that a trace holds: of two parts each 60 MB of memory, 140 MB of file, or 14 MB compressed."""
Event = dict[str, Any]
Records = collections.deque[BatchRecord | float]
"""The oldest first; a number is the time of a break."""


@contextlib.contextmanager
def traced(path: str | os.PathLike[str], stages: Stages, accounts: Accounts) -> Iterator[Path]:
    """The context of `Feed.trace`."""
    process, processes = jax.process_index(), jax.process_count()
    file = file_of_process(path, process, processes)
    records, counted, began = Records(maxlen=MAX_BATCHES), itertools.count(), time.perf_counter()

    def keep(record: BatchRecord | float) -> None:
        records.append(record)
        next(counted)

    accounts.keep_with(keep)
    try:
        yield file
    finally:
        ended = time.perf_counter()
        accounts.keep_with(None)
        left_out = next(counted) - len(records)
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
                "batches_left_out": left_out,
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
        names = [*sorted(threads, key=_rank), LOOP]
        self._tracks = {name: process * 10_000 + number for number, name in enumerate(names, start=1)}
        self._ids = itertools.count(process << 32)  # Perfetto refuses flows whose id is no integer

    def __iter__(self) -> Iterator[Event]:
        ready: list[tuple[float, int]] = []
        for record, following in itertools.zip_longest(self._records, self._records[1:]):
            if isinstance(record, BatchRecord):
                left = following.asked if isinstance(following, BatchRecord) else following or self._ended
                yield from self._batch(record, left)
                ready += [(_put(record), 1), (record.taken, -1)]
        count = 0
        for at, change in sorted(ready):
            count += change
            yield self._event("C", "ready", at, args={"batches": count})
        yield self._event("M", "process_name", args={"name": self._title})
        for track in self._tracks:
            yield self._event("M", "thread_name", track=track, args={"name": track})

    def _batch(self, record: BatchRecord, left: float) -> Iterator[Event]:
        """How a batch was read, placed, and taken; and how it waited in host memory, and on the devices."""
        placed, step = record.placed, {"step": record.step}
        epoch, position = self._begins(record.before)
        whole = {**step, "epoch": epoch, "position": position, "rows": record.rows, "bytes": self._nbytes}
        place = placed.thread, placed.began, _put(record)
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
            yield from self._flow((part.thread, part.began, part.began + part.read_s), place)
        yield self._span("place", place, whole)
        read = max((part.ended for part in record.parts), default=placed.began)
        yield from self._apart("read ahead", read, max(read, placed.began), step)
        ready_s = self._transfers.get(placed.began)
        if ready_s is not None and ready_s > placed.place_s:
            yield from self._apart("transfer", placed.began, placed.began + ready_s, step)
        yield from self._apart("ready", _put(record), record.taken, step)
        yield self._span("wait", (LOOP, record.asked, record.taken), whole)
        yield self._span("step", (LOOP, record.taken, left), whole)
        yield from self._flow(place, (LOOP, record.taken, left))

    def _span(self, stage: str, where: tuple[str, float, float], args: Event) -> Event:
        """Work of a thread, from one time to another."""
        track, began, ended = where
        return self._event("X", stage, began, track, dur=(self._ns(ended) - self._ns(began)) / 1000, args=args)

    def _apart(self, stage: str, began: float, ended: float, args: Event) -> Iterator[Event]:
        """A state of a batch, which is no work of a thread and may overlap that of other batches."""
        same: Event = {"id2": {"local": hex(next(self._ids))}, "args": args}  # local: a track of this process
        yield self._event("b", stage, began, **same)
        yield self._event("e", stage, ended, **same)

    def _flow(self, *spans: tuple[str, float, float]) -> Iterator[Event]:
        """An arrow from the first of two spans to the second."""
        number = next(self._ids)
        for (track, began, ended), more in zip(spans, ({"ph": "s"}, {"ph": "f", "bp": "e"}), strict=True):
            middle = (began + ended) / 2  # within the span, and so bound to it
            yield {**self._event("", "batch", middle, track, id=number), **more}

    def _event(self, phase: str, name: str, at: float | None = None, track: str = LOOP, **more: Any) -> Event:
        when = {} if at is None else {"ts": self._ns(at) / 1000}
        where = {"pid": self._process, "tid": self._tracks[track]}
        return {"ph": phase, "cat": "feedline", "name": name, **where, **when, **more}

    def _ns(self, at: float) -> int:
        return round((at - self.origin) * 1e9)


def _put(record: BatchRecord) -> float:
    """When it was placed."""
    return min(record.taken, record.placed.began + record.placed.place_s)


def _rank(thread: str) -> tuple[Any, ...]:
    """Sorts feedline-read-2 before feedline-read-10, and the placing thread after both."""
    return "place" in thread, [int(word) for word in re.findall(r"\d+", thread)], thread
