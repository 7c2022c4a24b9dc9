"""The main function of each process of a launch: runs every layout and writes what it observed."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from feedline import cluster
from feedline._src.rows.row_source import is_ragged
from feedline._src.streams.lane_files import load_lanes, save_lanes
from feedline._src.tools.audit.coverage import measure_coverage
from feedline._src.tools.audit.digest import shard_digests
from feedline._src.tools.audit.layouts import AXES, Layout, launches
from feedline._src.tools.audit.target import build_feed, endless_batches, load_make_feed
from feedline._src.tools.audit.verdict import NotRun, Observed, Settings, State

DONE = "feedline audit: done"
"""A process prints this with k after layout k of its launch, from 0."""
TIMEOUT_LINE = r"Timeout \(.*\)!$"
"""What `faulthandler` prints on standard error before it ends a process that takes too long."""

_START_S = 120.0
_CLOSE_S = 5.0


class Job(NamedTuple):
    """What all launches have in common: options of `feedline audit`."""

    target: str
    counts: tuple[int, ...]
    batches: int
    batch_size: int | None
    limit_s: float


def result_file(folder: Path, layout: int, process: int) -> Path:
    """The file to which a process writes what it observed in a layout of its launch."""
    return folder / f"{layout}.{process}.result"


def main(folder: str, launch: int, options: tuple[Any, ...]) -> None:
    """Run each layout of a launch, write its `result_file`, print `DONE`, and wait to be killed.

    Args:
      folder: that of the launch; states are saved beside it.
      options: the fields of the `Job`.
    """
    job, files = Job(*options), Path(folder)
    _end_after(_START_S)
    cluster.initialize()
    jax.devices()  # their start is no part of a layout's time
    for number, layout in enumerate(launches(job.counts)[launch]):
        _end_after(job.limit_s)
        with contextlib.ExitStack() as open_feeds:
            result: Observed | NotRun
            try:
                result = _run(files.parent, job, layout, open_feeds)
            except Exception as error:  # noqa: BLE001  the audit reports every kind of error
                traceback.print_exc()
                line = traceback.format_exception_only(error)[0].strip()
                # a source that cannot be pickled is no fault: the audit asked for workers, not the user
                result = NotRun(line, failed=not (layout.workers and "pickle" in line))
            _replace(result_file(files, number, jax.process_index()), pickle.dumps(result))
            faulthandler.cancel_dump_traceback_later()
            print(f"\n{DONE} {number}", flush=True)  # the user's code may have printed half a line
            if layout.killed:
                signal.pause()  # with the feed open and reading ahead
    signal.pause()


def _end_after(seconds: float) -> None:
    """End this process when the time is up, with the stacks of its threads on standard error."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def _run(folder: Path, job: Job, layout: Layout, open_feeds: contextlib.ExitStack) -> Observed | NotRun:
    began = time.perf_counter()
    make_feed = load_make_feed(job.target, layout.devices)
    try:
        feed = build_feed(make_feed, Mesh(layout.arranged(jax.devices()), AXES), layout, job.batch_size)
    except ValueError as error:
        if layout.workers or layout.times > 1:  # these options are the audit's, not the user's
            return NotRun(str(error), failed=False)
        raise
    open_feeds.callback(feed.close, _CLOSE_S)
    first = feed.get_state()
    settings = Settings(
        rows=first["fingerprint"]["rows"],
        transformed=feed.options.transform is not None,
        **{name: getattr(feed.options, name) for name in ("batch_size", "remainder", "epochs")},
    )
    if settings.rows is None and layout.times > 1:
        return NotRun("the rows of a stream have no position to compare them by", failed=False)
    if layout.times > 1 and is_ragged(feed.options.source):
        return NotRun("in a larger batch, ragged leaves may be padded to another length", failed=False)
    taken = 0
    if layout.resumes:
        taken, state = _loaded(folder / layout.resumes)
        feed.set_state(state)
    half = (job.batches + 1) // 2
    count = half if layout.saves else (job.batches - taken) // layout.times
    observed = Observed(
        settings=settings,
        leaves={
            f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape[1:])}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(feed.spec)
        },
        digests=[],
        shapes=[],
        states=[],
        first_batch=taken,
    )
    for number, batch in enumerate(itertools.islice(endless_batches(feed), count), 1):
        arrays = jax.tree.leaves(batch)
        observed.digests.append([shard_digests(array, leaf) for leaf, array in enumerate(arrays)])
        observed.shapes.append([array.shape[1:] for array in arrays])
        state = feed.get_state()
        observed.states.append({name: state[name] for name in ("step", "epoch", "position")})
        if layout.saves:
            _save(folder / layout.saves, number, state)
    observed = dataclasses.replace(observed, seconds=time.perf_counter() - began)
    if layout.is_reference:
        return dataclasses.replace(observed, coverage=measure_coverage(feed, observed, first))
    return observed


def _save(path: Path, taken: int, state: State) -> None:
    """Save a state as training does: process 0 writes it atomically, every process its lanes."""
    if "lanes" in state:
        save_lanes(state, _lanes(path, taken))
    if jax.process_index() == 0:
        _replace(path, json.dumps([taken, state]).encode())


def _loaded(path: Path) -> tuple[int, State]:
    """What was saved last: how many batches were taken, and the state.

    All lanes are complete, because a launch ends only when every process is done.
    """
    taken, state = json.loads(path.read_text())
    return taken, load_lanes(_lanes(path, taken)) if "lanes" in state else state


def _lanes(path: Path, taken: int) -> Path:
    """The folder with the lanes of one step."""
    return path.with_name(f"{path.name}.{taken}")


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
