"""Starts the processes of each launch and collects what they observed; no process outlives the audit."""

from __future__ import annotations

import functools
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from feedline._src.errors import FeedError
from feedline._src.tools.audit.job import DONE, Job, job_file, result_file
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.observed import Crashed, Observed, Refused
from feedline._src.tools.launch.process_group import ProcessGroup

Result = Observed | Refused
Read = TypeVar("Read")
_START_S = 120.0
_SHOWN_LINES = 8
_DONE_LINE = re.compile(rf"\[(\d+)\] {DONE} (\d+)".encode())


def results(
    job: Job, launches: Sequence[Sequence[Layout]], environ: Mapping[str, str], limit_s: float
) -> Generator[tuple[Layout, list[Result]], None, None]:
    """Yields each layout with what its processes observed, as soon as all of them are done with it.

    Raises:
      FeedError: a process failed, or a layout took longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-audit-", ignore_cleanup_errors=True) as name:
        for launch, layouts in enumerate(launches):
            job_file(Path(name), launch).write_bytes(pickle.dumps((job, layouts)))
            yield from _launched(Path(name), launch, layouts, environ, limit_s)


def _launched(
    folder: Path, launch: int, layouts: Sequence[Layout], environ: Mapping[str, str], limit_s: float
) -> Iterator[tuple[Layout, list[Result]]]:
    processes = range(layouts[0].processes)
    log = folder / f"{launch}.log"
    # When the block ends, the launcher and all its processes are killed by SIGKILL. A layout with killed=True
    # relies on that: its processes wait with their feeds open.
    with log.open("wb") as errors, ProcessGroup() as group:
        output = _Output(group.start(_command(folder, launch, layouts[0]), environ, stderr=errors.fileno()), log)
        output.wait(processes, 0, "the start", _START_S, lambda process: None)
        for number, layout in enumerate(layouts, 1):
            read = functools.partial(_result, layout, folder, launch, number)
            yield layout, output.wait(processes, number, layout.title, limit_s, read)


def _command(folder: Path, launch: int, layout: Layout) -> list[str]:
    devices = layout.devices // layout.processes
    options = ["--processes", str(layout.processes), "--devices-per-process", str(devices), "--cpu"]
    program = f"from feedline._src.tools.audit.process import main; main({str(folder)!r}, {launch})"
    return [sys.executable, "-m", "feedline", "launch", *options, "--", sys.executable, "-c", program]


class _Output:
    """Reads the `DONE` lines in the standard output of one launch, and drops all other lines."""

    def __init__(self, launcher: subprocess.Popen[bytes], log: Path) -> None:
        assert launcher.stdout is not None
        self._output = launcher.stdout.fileno()
        self._log = log
        self._done: set[tuple[int, int]] = set()  # (process, number)
        self._incomplete_line = b""  # Has no line end.

    def wait(
        self, processes: range, number: int, what: str, limit_s: float, read: Callable[[int], Read]
    ) -> list[Read]:
        """Waits until all processes are done with `number`; calls `read(process)` as soon as each is.

        Raises:
          FeedError: not all were done in time, or a process ended.
        """
        deadline = time.monotonic() + limit_s
        found: dict[int, Read] = {}
        while True:
            found |= {i: read(i) for i in processes if i not in found and (i, number) in self._done}
            missing = [str(i) for i in processes if i not in found]
            if not missing:
                return [found[i] for i in processes]
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise FeedError(
                    f"{what} must take no more than {limit_s:g} s, and process {', '.join(missing)} took longer; "
                    f"find what it waits for, or raise --limit-s.{self._last_lines()}"
                )
            self._read(what)

    def _read(self, what: str) -> None:
        chunk = os.read(self._output, 1 << 16)
        if not chunk:
            raise FeedError(
                f"a process must live as long as the audit, and one ended in {what}.{self._last_lines()}"
            )
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        for line in lines:
            if match := _DONE_LINE.fullmatch(line):
                self._done.add((int(match[1]), int(match[2])))

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return " The last lines were:\n" + "\n".join(lines) if lines else ""


def _result(layout: Layout, folder: Path, launch: int, number: int, process: int) -> Result:
    result: Result | Crashed = pickle.loads(result_file(folder, launch, number, process).read_bytes())
    if isinstance(result, Crashed):
        raise FeedError(f"{layout.title}: {result.line}", process=process)
    return result
