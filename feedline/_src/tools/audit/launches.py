"""Starts the processes of each launch and collects what they observed; no process outlives the audit."""

from __future__ import annotations

import collections
import io
import pickle
import re
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from feedline._src.errors import FeedError
from feedline._src.tools.audit.layouts import Layout, launches
from feedline._src.tools.audit.process import DONE, TIMEOUT_LINE, Job, result_file
from feedline._src.tools.audit.verdict import NotRun, Observed
from feedline._src.tools.launch.process_group import ProcessGroup

Result = Observed | NotRun
_SHOWN_LINES = 20
_DONE_LINE = re.compile(rf"\[(\d+)\] {DONE} (\d+)\n".encode())


def results(job: Job, environ: Mapping[str, str]) -> Generator[tuple[Layout, list[Result]], None, None]:
    """Yields each layout with what its processes observed, as soon as all of them are done with it.

    Raises:
      FeedError: a process failed, or a layout took longer than `job.limit_s`.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-audit-", ignore_cleanup_errors=True) as folder:
        for launch, layouts in enumerate(launches(job.counts)):
            own = Path(folder) / str(launch)
            own.mkdir()
            yield from _launched(job, own, launch, layouts, environ)


def _launched(
    job: Job, folder: Path, launch: int, layouts: Sequence[Layout], environ: Mapping[str, str]
) -> Iterator[tuple[Layout, list[Result]]]:
    processes, devices = layouts[0].processes, layouts[0].devices
    program = (
        f"from feedline._src.tools.audit.process import main; main({str(folder)!r}, {launch}, {tuple(job)!r})"
    )
    options = ["--processes", str(processes), "--devices-per-process", str(devices // processes), "--cpu"]
    command = [sys.executable, "-m", "feedline", "launch", *options, "--", sys.executable, "-c", program]
    found: dict[int, dict[int, Result]] = collections.defaultdict(dict)  # by layout and process
    log = folder / "log"
    # When the block ends, the launcher and all its processes are killed by SIGKILL. A layout with killed=True
    # relies on that: its processes wait with their feeds open.
    with log.open("wb") as errors, ProcessGroup() as group:
        launcher = group.start(command, environ, stderr=errors.fileno())
        output = io.BufferedReader(launcher.stdout)  # type: ignore[type-var]
        for number, layout in enumerate(layouts):
            while len(found[number]) < processes:
                line = output.readline()
                if not line:
                    late = [str(process) for process in range(processes) if process not in found[number]]
                    raise FeedError(_why_ended(layout, late, job.limit_s, log.read_text(errors="replace")))
                if match := _DONE_LINE.fullmatch(line):
                    process, done = int(match[1]), int(match[2])
                    found[done][process] = _result(folder, layouts[done], done, process)
            yield layout, [found[number][process] for process in range(processes)]


def _result(folder: Path, layout: Layout, number: int, process: int) -> Result:
    result: Result = pickle.loads(result_file(folder, number, process).read_bytes())
    if isinstance(result, NotRun) and result.failed:
        raise FeedError(f"{layout.title}: {result.reason}", process=process)
    return result


def _why_ended(layout: Layout, late: Sequence[str], limit_s: float, log: str) -> str:
    """The message when the processes have ended, but not all were done with the layout."""
    lines = log.splitlines()[-_SHOWN_LINES:]
    last = " The last lines were:\n" + "\n".join(lines) if lines else ""
    if not re.search(TIMEOUT_LINE, log, re.MULTILINE):
        return f"a process must live as long as the audit, and one ended in {layout.title}.{last}"
    return (
        f"{layout.title} must take no more than {limit_s:g} s, and process {', '.join(late)} took longer; find "
        f"what it waits for, or raise --limit-s.{last}"
    )
