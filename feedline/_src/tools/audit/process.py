"""The main function of each process of a launch: runs every layout and writes what it observed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from feedline import cluster
from feedline._src.feed import Feed
from feedline._src.rows.row_source import is_ragged
from feedline._src.streams.lane_files import load_lanes, save_lanes
from feedline._src.tools.audit.coverage import measure_coverage
from feedline._src.tools.audit.faults import with_fault
from feedline._src.tools.audit.feeds import build_feed, endless_batches
from feedline._src.tools.audit.job import DONE, Job, job_file, result_file
from feedline._src.tools.audit.layouts import AXES, Layout
from feedline._src.tools.audit.observed import Crashed, Observed, Refused, Settings, State, shard_digests
from feedline._src.tools.audit.target import load_make_feed

_CLOSE_S = 5.0


def main(folder: str, launch: int) -> None:
    """Run each layout of a launch, write its `result_file`, print `DONE`, and wait to be killed."""
    files = Path(folder)
    job, layouts = pickle.loads(job_file(files, launch).read_bytes())
    cluster.initialize()
    jax.devices()  # their start is no part of a layout's time
    print(f"\n{DONE} 0", flush=True)
    for number, layout in enumerate(layouts, 1):
        with contextlib.ExitStack() as open_feeds:
            result: Observed | Refused | Crashed
            try:
                result = _run(files, job, layout, open_feeds)
            except Exception as error:  # noqa: BLE001  the audit reports every kind of error
                traceback.print_exc()
                line = traceback.format_exception_only(error)[0].strip()
                # a source that cannot be pickled is no fault: the audit asked for workers, not the user
                result = Refused(line) if layout.workers and "pickle" in line else Crashed(line)
            _replace(result_file(files, launch, number, jax.process_index()), pickle.dumps(result))
            print(f"\n{DONE} {number}", flush=True)  # the user's code may have printed half a line
            if layout.killed:
                signal.pause()  # with the feed open and reading ahead
    signal.pause()


def _run(folder: Path, job: Job, layout: Layout, open_feeds: contextlib.ExitStack) -> Observed | Refused:
    began = time.perf_counter()
    make_feed = load_make_feed(job.target, layout.devices)
    try:
        feed = build_feed(make_feed, Mesh(layout.arranged(jax.devices()), AXES), layout, job.batch_size)
    except ValueError as error:
        if layout.workers or layout.times > 1:  # these options are the audit's, not the user's
            return Refused(str(error))
        raise
    open_feeds.callback(feed.close, _CLOSE_S)
    first = feed.get_state()
    settings = Settings(
        rows=first["fingerprint"]["rows"],
        transformed=feed.options.transform is not None,
        **{name: getattr(feed.options, name) for name in ("batch_size", "remainder", "epochs")},
    )
    if settings.rows is None and layout.times > 1:
        return Refused("the rows of a stream have no position to compare them by")
    if layout.times > 1 and is_ragged(feed.options.source):
        return Refused("in a larger batch, ragged leaves may be padded to another length")
    saved: dict[str, Any] = {"taken": 0}
    if layout.resumes:
        saved = _loaded(folder / layout.resumes)
        feed.set_state(saved["state"])
    count = job.half if layout.saves else (job.batches - saved["taken"]) // layout.times
    batches_on = lambda mesh: endless_batches(build_feed(make_feed, mesh, layout, job.batch_size))  # noqa: E731
    batches = with_fault(job.plant, layout, endless_batches(feed), batches_on)
    digests, states = _delivered(feed, itertools.islice(batches, count), _saver(folder, layout))
    leaves = jax.tree_util.tree_leaves_with_path(feed.spec)
    observed = Observed(
        settings=settings,
        names=[f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves],
        row_specs=[(leaf.shape[1:], leaf.dtype) for _, leaf in leaves],
        batches=digests,
        states=states,
        first_batch=saved["taken"],
        seconds=time.perf_counter() - began,
    )
    if layout.is_reference:
        return dataclasses.replace(observed, coverage=measure_coverage(feed, feed.options.source, observed, first))
    return observed


def _delivered(feed: Feed, batches: Iterator[Any], save: Callable[[State], None]) -> tuple[list[Any], list[State]]:
    """The digests of all shards on this process, [batch][leaf][device], and the state after each batch."""
    digests, states = [], []
    for batch in batches:
        digests.append([shard_digests(array, i) for i, array in enumerate(jax.tree.leaves(batch))])
        state = feed.get_state()
        states.append({name: state[name] for name in ("step", "epoch", "position")})
        save({"taken": len(digests), "state": state})
    return digests, states


def _saver(folder: Path, layout: Layout) -> Callable[[State], None]:
    """A function that saves a state as training does: process 0 writes it atomically; every process its lanes."""
    path = folder / layout.saves

    def save(saved: State) -> None:
        if not layout.saves:
            return
        if "lanes" in saved["state"]:
            save_lanes(saved["state"], _lanes(path, saved))
        if jax.process_index() == 0:
            _replace(path, json.dumps(saved).encode())

    return save


def _loaded(path: Path) -> State:
    """What was saved last. All lanes are complete, because a launch ends only when every process is done."""
    saved: State = json.loads(path.read_text())
    if "lanes" in saved["state"]:
        saved["state"] = load_lanes(_lanes(path, saved))
    return saved


def _lanes(path: Path, saved: State) -> Path:
    """The folder with the lanes of one step."""
    return path.with_name(f"{path.name}.{saved['taken']}")


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
