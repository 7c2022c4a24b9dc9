"""Starts the processes of each launch, runs the layouts in them, and collects what they observed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from feedline import cluster
from feedline._src.errors import FeedError
from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.lane_files import load_lanes, save_lanes
from feedline._src.sources.as_source import as_source
from feedline._src.tools.audit.coverage import measure_coverage
from feedline._src.tools.audit.digest import shard_digests
from feedline._src.tools.audit.layouts import AXES, Layout, launches
from feedline._src.tools.audit.verdict import Coverage, Difference, NotRun, Observed, Settings, State
from feedline._src.tools.process_group import process_group
from feedline._src.tools.targets import build_feed, load_make_feed, one_size

Result = Observed | NotRun
_START_S = 120.0
_CLOSE_S = 5.0
_SHOWN_LINES = 20
_DONE = "feedline audit: done"
_DONE_LINE = re.compile(rf"\[(\d+)\] {_DONE} (\d+)\n".encode())
_TIMEOUT_LINE = r"Timeout \(.*\)!$"
"""What `faulthandler` prints on standard error before it ends a process that takes too long."""


class Job(NamedTuple):
    """The options of `feedline audit`; `counts` are the numbers of processes, ascending."""

    target: str
    counts: tuple[int, ...]
    batches: int
    batch_size: int | None
    limit_s: float


def results(job: Job, environ: Mapping[str, str]) -> Generator[tuple[Layout, list[Result]], None, None]:
    """Yield each layout with what its processes observed, once all of them are done with it.

    No process outlives the generator. FeedError if one failed, or a layout took longer than `job.limit_s`.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-audit-", ignore_cleanup_errors=True) as folder:
        for launch, layouts in enumerate(launches(job.counts)):
            own = Path(folder, str(launch))
            own.mkdir()
            yield from _launched(job, own, launch, layouts, environ)


def _launched(
    job: Job, folder: Path, launch: int, layouts: Sequence[Layout], environ: Mapping[str, str]
) -> Iterator[tuple[Layout, list[Result]]]:
    processes, devices = layouts[0].processes, layouts[0].devices
    program = (
        "from feedline._src.tools.audit.processes import run_launch; "
        f"run_launch({str(folder)!r}, {launch}, {tuple(job)!r})"
    )
    options = ["--processes", str(processes), "--devices-per-process", str(devices // processes), "--cpu"]
    command = [sys.executable, "-m", "feedline", "launch", *options, "--", sys.executable, "-c", program]
    found: dict[int, dict[int, Result]] = collections.defaultdict(dict)  # by layout and process
    log = folder / "log"
    # When the block ends, the launcher and all its processes are killed by SIGKILL. A layout that saves relies on
    # that: its processes wait with their feeds open.
    with contextlib.ExitStack() as stack:
        errors, group = stack.enter_context(log.open("wb")), stack.enter_context(process_group())
        launcher = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=group,
        )
        stack.callback(launcher.wait)  # runs second
        stack.callback(os.killpg, group, signal.SIGKILL)
        output = stack.enter_context(launcher.stdout)  # type: ignore[arg-type]
        for number, layout in enumerate(layouts):
            while len(found[number]) < processes:
                line = output.readline()
                if not line:
                    late = [str(process) for process in range(processes) if process not in found[number]]
                    raise FeedError(_why_ended(layout, late, job.limit_s, log.read_text(errors="replace")))
                if match := _DONE_LINE.fullmatch(line):
                    process, done = int(match[1]), int(match[2])
                    result: Result = pickle.loads(_result_file(folder, done, process).read_bytes())
                    if isinstance(result, NotRun) and result.failed:
                        raise FeedError(f"{layouts[done].title}: {result.reason}", process=process)
                    found[done][process] = result
            yield layout, [found[number][process] for process in range(processes)]


def _why_ended(layout: Layout, late: Sequence[str], limit_s: float, log: str) -> str:
    """The message when the processes have ended, but not all were done with the layout."""
    lines = log.splitlines()[-_SHOWN_LINES:]
    last = " The last lines were:\n" + "\n".join(lines) if lines else ""
    if not re.search(_TIMEOUT_LINE, log, re.MULTILINE):
        return f"a process must live as long as the audit, and one ended in {layout.title}.{last}"
    return (
        f"{layout.title} must take no more than {limit_s:g} s, and process {', '.join(late)} took longer; find "
        f"what it waits for, or raise --limit-s.{last}"
    )


def _result_file(folder: Path, layout: int, process: int) -> Path:
    return folder / f"{layout}.{process}.result"


# --- in each process of a launch ---


def run_launch(folder: str, launch: int, options: tuple[Any, ...]) -> None:
    """Run each layout of a launch, write and announce each result, and wait to be killed."""
    job, files = Job(*options), Path(folder)
    _end_after(_START_S)
    cluster.initialize()
    jax.devices()  # start the backend before a layout's time begins
    for number, layout in enumerate(launches(job.counts)[launch]):
        _end_after(job.limit_s)
        with contextlib.ExitStack() as open_feeds:
            result: Result
            try:
                result = _run(files.parent, job, layout, open_feeds)
            except Exception as error:  # noqa: BLE001  the audit reports every kind of error
                traceback.print_exc()
                line = traceback.format_exception_only(error)[0].strip()
                # a source that cannot be pickled is no fault: the audit asked for workers, not the user
                result = NotRun(line, failed=not (layout.workers and "pickle" in line))
            _replace(_result_file(files, number, jax.process_index()), pickle.dumps(result))
            faulthandler.cancel_dump_traceback_later()
            print(f"\n{_DONE} {number}", flush=True)  # the user's code may have printed half a line
            if layout.saves:
                signal.pause()  # with the feed open and reading ahead
    signal.pause()


def _end_after(seconds: float) -> None:
    """End this process when the time is up, with the stacks of its threads on standard error."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def _run(folder: Path, job: Job, layout: Layout, open_feeds: contextlib.ExitStack) -> Result:
    def changed(options: FeedOptions) -> FeedOptions:
        options = one_size(options)
        reading, size = options.reading, (job.batch_size or options.sizes[0][1]) * layout.times
        if layout.workers is not None:
            reading = dataclasses.replace(reading, workers=layout.workers)
        if layout.threads is not None:  # with a buffer of one batch, all threads read parts of the same batch
            reading = dataclasses.replace(reading, threads=layout.threads, buffer=1)
        return dataclasses.replace(options, batch_size=size, reading=reading)

    make_feed, mesh = load_make_feed(job.target, layout.devices), Mesh(layout.arranged(jax.devices()), AXES)
    try:
        feed = build_feed(job.target, make_feed, mesh, changed)
    except ValueError as error:
        if layout.workers or layout.times > 1:  # these options are the audit's, not the user's
            return NotRun(str(error), failed=False)
        raise
    open_feeds.callback(feed.close, _CLOSE_S)
    if feed.get_state()["fingerprint"]["rows"] is None and layout.times > 1:
        return NotRun("the rows of a stream have no position to compare them by", failed=False)
    if layout.times > 1 and as_source(feed.options.source).ragged_leaves:
        return NotRun("in a larger batch, ragged leaves may be padded to another length", failed=False)
    taken = 0
    if layout.resumes:
        # all lanes are complete, because a launch ends only when every process is done
        path = folder / layout.resumes
        taken, state = json.loads(path.read_text())
        feed.set_state(load_lanes(_lanes(path, taken)) if "lanes" in state else state)
    count = (job.batches + 1) // 2 if layout.saves else (job.batches - taken) // layout.times
    save = None
    if layout.saves:

        def save(taken: int, state: State) -> None:
            """Save like a training loop: process 0 writes the state atomically, every process its lanes."""
            path = folder / layout.saves
            if "lanes" in state:
                save_lanes(state, _lanes(path, taken))
            if jax.process_index() == 0:
                _replace(path, json.dumps([taken, state]).encode())

    observed = observe(feed, count, taken, save)
    coverage: Coverage | Difference | None = None
    if layout.is_reference:
        try:
            coverage = measure_coverage(feed, observed)
        except Difference as difference:
            coverage = difference
    return dataclasses.replace(observed, coverage=coverage)


def observe(
    feed: Feed, batches: int, first_batch: int = 0, save: Callable[[int, State], None] | None = None
) -> Observed:
    """Take batches of a feed, over as many passes as that needs, and digest what this process's devices hold.

    `first_batch` batches were taken before the feed's state was saved. `save` is called after each batch.
    """
    settings = Settings(
        rows=feed.get_state()["fingerprint"]["rows"],
        transformed=feed.options.transform is not None,
        **{name: getattr(feed.options, name) for name in ("batch_size", "remainder", "epochs")},
    )
    leaves = {
        f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape[1:])}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(feed.spec)
    }
    observed = Observed(settings, leaves, first_batch=first_batch)
    # a feed that was restored at the end of a pass begins with an empty pass
    passes = itertools.chain.from_iterable(feed for _ in range(batches + 1))
    for number, batch in enumerate(itertools.islice(passes, batches), 1):
        arrays = jax.tree.leaves(batch)
        observed.digests.append([shard_digests(array, leaf) for leaf, array in enumerate(arrays)])
        observed.shapes.append([array.shape[1:] for array in arrays])
        state = feed.get_state()
        observed.states.append({name: state[name] for name in ("step", "epoch", "position")})
        if save is not None:
            save(number, state)
    if len(observed.states) < batches:
        raise ValueError(
            "a pass of a feed must hold at least one batch, and this feed's hold none; use a smaller one"
        )
    return observed


def _lanes(path: Path, taken: int) -> Path:
    return path.with_name(f"{path.name}.{taken}")


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
