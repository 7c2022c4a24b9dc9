"""What each process of a launch does: runs every layout, and writes down what it held."""

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
from feedline.audit.census import census
from feedline.audit.feeds import built, endless
from feedline.audit.held import Failed, Held, Refused, Settings, State, pieces_of
from feedline.audit.job import DONE, Job, job_file, result_file
from feedline.audit.layouts import AXES, Layout
from feedline.audit.plant import planted
from feedline.audit.target import maker
from feedline.feed import Feed
from feedline.streams.lane_files import load_lanes, save_lanes

_CLOSE_S = 5.0


def main(folder: str, launch: int) -> None:
    """Run each layout of a launch, write its `result_file`, say so, and wait to be killed."""
    here = Path(folder)
    job, layouts = pickle.loads(job_file(here, launch).read_bytes())
    cluster.initialize()
    print(f"\n{DONE} 0", flush=True)
    for number, layout in enumerate(layouts, 1):
        with contextlib.ExitStack() as until_told:
            result: Held | Refused | Failed
            try:
                result = _run(here, job, layout, until_told)
            except Exception as error:  # noqa: BLE001  whatever it is, the audit tells it
                traceback.print_exc()
                line = traceback.format_exception_only(error)[0].strip()
                # a source that cannot travel to workers is no fault: it was the audit that asked for them
                result = Refused(line) if layout.workers and "pickle" in line else Failed(line)
            _replace(result_file(here, launch, number, jax.process_index()), pickle.dumps(result))
            print(f"\n{DONE} {number}", flush=True)  # on a line of its own: the user's code may have begun one
            if layout.killed:
                signal.pause()  # with the feed open and reading ahead
    signal.pause()


def _run(folder: Path, job: Job, layout: Layout, until_told: contextlib.ExitStack) -> Held | Refused:
    began = time.perf_counter()
    make_feed = maker(job.target, layout.devices)
    try:
        feed, arguments = built(make_feed, Mesh(layout.arranged(jax.devices()), AXES), layout, job.batch_size)
    except ValueError as error:
        if layout.workers or layout.times > 1:  # the audit's wish, not the user's
            return Refused(str(error))
        raise
    until_told.callback(feed.close, _CLOSE_S)
    first = feed.get_state()
    settings = Settings(
        rows=first["fingerprint"]["rows"],
        transformed=arguments["transform"] is not None,
        **{name: arguments[name] for name in ("batch_size", "remainder", "epochs")},
    )
    if settings.rows is None and layout.times > 1:
        return Refused("the rows of a stream have no position to compare them by")
    saved: dict[str, Any] = {"taken": 0}
    if layout.resumes:
        saved = _loaded(folder / layout.resumes)
        feed.set_state(saved["state"])
    count = job.half if layout.saves else (job.batches - saved["taken"]) // layout.times
    whole = lambda mesh: endless(built(make_feed, mesh, layout, job.batch_size)[0])  # noqa: E731
    batches = planted(job.plant, layout, endless(feed), whole)
    batches_held, states = _delivered(feed, itertools.islice(batches, count), _saver(folder, layout))
    leaves = jax.tree_util.tree_leaves_with_path(feed.spec)
    held = Held(
        settings=settings,
        names=[f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves],
        forms=[(leaf.shape[1:], leaf.dtype) for _, leaf in leaves],
        batches=batches_held,
        states=states,
        taken=saved["taken"],
        seconds=time.perf_counter() - began,
    )
    if layout.alone:
        return dataclasses.replace(held, census=census(feed, arguments["source"], held, first))
    return held


def _delivered(feed: Feed, batches: Iterator[Any], save: Callable[[State], None]) -> tuple[list[Any], list[State]]:
    held, states = [], []
    for batch in batches:
        held.append([pieces_of(array, i) for i, array in enumerate(jax.tree.leaves(batch))])
        state = feed.get_state()
        states.append({name: state[name] for name in ("step", "epoch", "position")})
        save({"taken": len(held), "state": state})
    return held, states


def _saver(folder: Path, layout: Layout) -> Callable[[State], None]:
    """Writes a state as a training does: on one process, whole or not at all; lanes on all, one file each."""
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
    """What was saved last. All lanes are there: a launch ends, or is killed, only once every process is done."""
    saved: State = json.loads(path.read_text())
    if "lanes" in saved["state"]:
        saved["state"] = load_lanes(_lanes(path, saved))
    return saved


def _lanes(path: Path, saved: State) -> Path:
    """The folder of the lanes of one step."""
    return path.with_name(f"{path.name}.{saved['taken']}")


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
