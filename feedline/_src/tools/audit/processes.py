"""Starts the processes of each launch, runs the layouts in them, and collects what they observed."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from feedline import cluster
from feedline._src.errors import FeedError
from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.lane_files import read_state, write_state
from feedline._src.sources.as_source import as_source
from feedline._src.tools.audit.coverage import measure_coverage
from feedline._src.tools.audit.digest import shard_digests
from feedline._src.tools.audit.layouts import AXES, Layout, devices_for, launches
from feedline._src.tools.audit.verdict import Difference, NotRun, Observed, Settings
from feedline._src.tools.process_group import process_group
from feedline._src.tools.targets import build_feed, load_make_feed, one_size

Results = Generator[tuple[Layout, list[Observed | NotRun]]]
_START_S = 120.0
_CLOSE_S = 5.0
_SHOWN_LINES = 20
_PLACE = ("step", "epoch", "position")
_FAILED = "failed"  # process k, if it fails, writes the reason to the file failed.k


class Job(NamedTuple):
    """The options of `feedline audit`; `counts` are the numbers of processes, ascending from 1."""

    target: str
    counts: tuple[int, ...]
    batches: int
    batch_size: int | None
    limit_s: float


def results(job: Job) -> Results:
    """Yield each layout, once all its processes have run it, with what they observed.

    No process outlives the generator. FeedError: a process failed, or a layout took longer than `job.limit_s`.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-audit-", ignore_cleanup_errors=True) as folder:
        for launch, layouts in enumerate(launches(job.counts)):
            own = Path(folder, str(launch))
            own.mkdir()
            yield from _launched(job, own, layouts)


def _launched(job: Job, folder: Path, layouts: Sequence[Layout]) -> Results:
    processes = layouts[0].processes
    devices = devices_for(job.counts) // processes
    program = f"from {__name__} import Job, run_launch; run_launch({job!r}, {str(folder)!r})"
    options = ["--processes", str(processes), "--devices-per-process", str(devices), "--cpu"]
    command = [sys.executable, "-m", "feedline", "launch", *options, "--", sys.executable, "-c", program]
    log = folder / "log"
    with (
        log.open("wb") as errors,
        process_group() as group,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, process_group=group
        ) as launcher,
    ):
        assert launcher.stdout is not None, "it is a pipe"
        try:
            for number, layout in enumerate(layouts):
                paths = [_path(folder, number, process) for process in range(processes)]
                # each process prints a line after it has written its file
                while late := [str(process) for process, path in enumerate(paths) if not path.exists()]:
                    if not launcher.stdout.readline():
                        lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                        raise FeedError(
                            f"{layout.title} must take no more than {job.limit_s:g} s, and none of its processes "
                            f"may end, but process {', '.join(late)} took longer or ended; find what it waits for "
                            "or what ended it, or raise --limit-s. The last lines were:\n" + "\n".join(lines)
                        )
                    for failed in folder.glob(f"{_FAILED}.*"):
                        raise FeedError(failed.read_text(), process=int(failed.suffix[1:]))
                yield layout, [pickle.loads(path.read_bytes()) for path in paths]
        finally:
            # kills all processes; after a layout that saves, they wait for this with open feeds
            os.killpg(group, signal.SIGKILL)


def _path(folder: Path, name: int | str, process: int) -> Path:
    return folder / f"{name}.{process}"


# --- in each process of a launch ---


def run_launch(job: Job, folder: str) -> None:
    """Run each layout of a launch, write and announce each result, and wait to be killed."""
    own = Path(folder)
    _end_after(_START_S)
    cluster.initialize()
    jax.devices()  # start the backend before a layout's time begins
    for number, layout in enumerate(launches(job.counts)[int(own.name)]):
        _end_after(job.limit_s)
        name, result = str(number), b""
        with contextlib.ExitStack() as open_feeds:
            try:
                result = pickle.dumps(_run(job, own, layout, open_feeds))
            except Exception as error:  # noqa: BLE001  the audit reports every kind of error
                traceback.print_exc()
                line = traceback.format_exception_only(error)[0].strip()
                if layout.workers and "pickle" in line:  # no fault: the audit, not the user, asked for workers
                    result = pickle.dumps(NotRun(line))
                else:
                    name, result = _FAILED, f"{layout.title}: {line}".encode()
            part = _path(own, "part", jax.process_index())
            part.write_bytes(result)
            part.replace(_path(own, name, jax.process_index()))
            faulthandler.cancel_dump_traceback_later()
            print(flush=True)
            if layout.saves or name == _FAILED:
                signal.pause()  # with the feed open and reading ahead
    signal.pause()


def _end_after(seconds: float) -> None:
    """After `seconds`, print the stacks of all threads on standard error, and end this process."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def _run(job: Job, folder: Path, layout: Layout, open_feeds: contextlib.ExitStack) -> Observed | NotRun:
    def changed(options: FeedOptions) -> FeedOptions:
        options = one_size(options)
        reading, size = options.reading, (job.batch_size or options.sizes[0][1]) * layout.times
        if layout.workers is not None:
            reading = dataclasses.replace(reading, workers=layout.workers)
        if layout.threads is not None:  # with a buffer of one batch, all threads read parts of the same batch
            reading = dataclasses.replace(reading, threads=layout.threads, buffer=1)
        return dataclasses.replace(options, batch_size=size, reading=reading)

    make_feed = load_make_feed(job.target, devices_for(job.counts))
    mesh = Mesh([[jax.devices()[k] for k in row] for row in layout.mesh], AXES)
    try:
        feed = build_feed(job.target, make_feed, mesh, changed)
    except ValueError as error:
        if layout.workers or layout.times > 1:  # the audit, not the user, asked for these options
            return NotRun(str(error))
        raise
    open_feeds.callback(feed.close, _CLOSE_S)
    if layout.times > 1 and feed.get_state()["fingerprint"]["rows"] is None:
        return NotRun("the rows of a stream have no positions by which to compare them")
    if layout.times > 1 and as_source(feed.options.source).ragged_leaves:
        return NotRun("in a larger batch, ragged leaves may be padded to another length")
    half = (job.batches + 1) // 2
    if layout.resumes:  # the state is complete, because a launch ends only when every process is done
        feed.set_state(read_state(folder.with_name(str(int(folder.name) - 1)) / "state"))
        return observe(feed, (job.batches - half) // layout.times, half)
    observed = observe(feed, half if layout.saves else job.batches // layout.times)
    if layout.saves:
        (folder / "state").mkdir(exist_ok=True)
        write_state(folder / "state", feed.get_state())
    if layout.is_reference:
        try:
            measure_coverage(feed, observed)
        except Difference as difference:
            observed.difference = difference
    return observed


def observe(feed: Feed, batches: int, first_batch: int = 0) -> Observed:
    """Take batches of a feed, over as many passes as needed, and digest what this process's devices hold.

    `first_batch`: the number of the first of these batches; 0 unless the feed resumed from a saved state.
    """
    state = feed.get_state()
    if not first_batch and any(state[name] for name in _PLACE):
        raise ValueError(
            f"make_feed must return a feed at its beginning, and this one is at {[state[n] for n in _PLACE]} "
            f"({', '.join(_PLACE)}); restore or seek in the training program, after its call of make_feed"
        )
    leaves = {
        f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape[1:])}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(feed.spec)
    }
    settings = Settings(
        rows=state["fingerprint"]["rows"],
        transformed=feed.options.transform is not None,
        leaves=leaves,
        **{name: getattr(feed.options, name) for name in ("batch_size", "remainder", "epochs")},
    )
    observed = Observed(settings, first_batch)
    # a feed that was restored at the end of a pass begins with an empty pass
    passes = itertools.chain.from_iterable(feed for _ in range(batches + 1))
    for batch in itertools.islice(passes, batches):
        arrays = jax.tree.leaves(batch)
        observed.digests.append([shard_digests(array, leaf) for leaf, array in enumerate(arrays)])
        observed.shapes.append([array.shape[1:] for array in arrays])
        state = feed.get_state()
        observed.states.append({name: state[name] for name in _PLACE})
    if len(observed.states) < batches:
        raise ValueError(
            "a pass of a feed must hold at least one batch, but this feed's passes hold none; use a smaller batch"
        )
    return observed
