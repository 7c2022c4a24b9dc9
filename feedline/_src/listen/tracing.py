"""Traces a running feed: keeps the records of its batches for some time, and then writes them as a file."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from feedline._src.listen.accounting import Accounting
from feedline._src.listen.trace import (
    Events,
    Recording,
    file_of_process,
    origin_of,
    trace_events,
    tracks_of,
    write_trace,
)
from feedline._src.order.schedule import Cursor
from feedline._src.run import Stages
from feedline._src.version import __version__

_log = logging.getLogger("feedline")


@contextlib.contextmanager
def traced(path: str | os.PathLike[str], stages: Stages, accounting: Accounting) -> Iterator[Path]:
    """The context of `Feed.trace`."""
    file = file_of_process(path, jax.process_index(), jax.process_count())
    recording, began = Recording(), time.perf_counter()
    accounting.keep_with(recording.keep)
    try:
        yield file
    finally:
        ended = time.perf_counter()
        accounting.keep_with(None)
        try:
            _write(file, recording, (began, ended), stages, accounting)
        except OSError as error:
            _log.warning(
                "the trace could not be written to %s: %s. Training goes on; free that disk, or choose a path on "
                "another one, and trace again",
                file,
                error,
            )
        except Exception:  # noqa: BLE001  a fault in what only observes must not end training
            _log.exception("feedline could not write the trace %s", file)


def _write(
    file: Path, recording: Recording, span: tuple[float, float], stages: Stages, accounting: Accounting
) -> None:
    """Write what was recorded between the two times of `span`."""
    records, (began, ended) = list(recording.records), span
    process, processes = jax.process_index(), jax.process_count()
    origin = origin_of(records, began)
    title = "feedline" if processes == 1 else f"feedline, process {process} of {processes}"
    events = Events(tracks_of(records), origin, process, title)
    facts = {
        "feedline": __version__,
        "process": process,
        "processes": processes,
        "batches_left_out": recording.left_out,
        "origin_monotonic_s": origin,
        "origin_unix_s": time.time() - (time.perf_counter() - origin),
    }
    body = trace_events(
        records,
        ended,
        events,
        transfers=accounting.transfers(),
        begins=lambda before: stages.access.next_cursor(Cursor(*before)),
        nbytes=stages.placement.local_bytes,
    )
    if recording.left_out:
        note = events.note(f"{recording.left_out} earlier batches are left out")
        body = itertools.chain(note, body)
    write_trace(file, body, facts)
