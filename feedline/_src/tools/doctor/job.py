"""Runs a command, observes its processes, and judges what was observed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor.checks import Leaf, batch_findings
from feedline._src.tools.doctor.findings import Finding, first_three, made
from feedline._src.tools.doctor.observe import LOOP
from feedline._src.tools.doctor.start import NOT_OBSERVED
from feedline._src.tools.process_group import process_group

Object = Mapping[str, Any]
_GRACE_S = 15.0
_JAX = """# Written by feedline for the processes of one command: `import jax` finds this file before jax itself.
import sys

folder = __file__.rpartition("/")[0]
del sys.modules["jax"]
place = sys.path.index(folder)
del sys.path[place]
try:
    import jax  # the real one, which takes the place of this module in sys.modules
finally:
    sys.path.insert(place, folder)  # processes that multiprocessing spawns get this path
try:
    from feedline._src.tools.doctor.start import begin
    begin(folder, {task!r})
except Exception as error:
    with open(folder + "/{not_observed}", "w") as file:
        file.write(f"the doctor failed in {{sys.executable}}: {{type(error).__name__}}: {{error}}")
"""
_MIN_SAMPLES = 200
_IDLE_SHARE = 0.5  # a warning requires idle devices before at least this share of the steps
_GROWTH_STEPS, _HOST_BYTES = 60, 64 << 20
_FED_BACK_BYTES = 64 << 10
_LATE_SHARE, _BUSY_SHARE = 0.08, 0.2


class Ran(NamedTuple):
    """A command that has ended.

    Attributes:
      code: its exit code; 128 + s if signal s ended it.
      stopped: whether Ctrl-C or the time limit ended it.
      processes: what each process wrote; first the process with the most calls of compiled functions.
      reason: why no process wrote anything; empty if one did.
    """

    code: int
    stopped: bool
    processes: list[dict[str, Any]]
    reason: str


def run(
    command: Sequence[str], environ: Mapping[str, str], limit_s: float | None = None, task: str = "observe"
) -> Ran:
    """Run a command, and call `start.begin` in each of its processes that imports jax.

    Through PYTHONPATH, `import jax` finds a module that imports the real jax and then installs the hooks. So the
    script runs unchanged, and processes that it starts are observed, too. After `limit_s` seconds the job receives
    SIGINT, as by Ctrl-C; if it still runs 15 s later, it is killed. None of its processes outlives this call.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-doctor-", ignore_cleanup_errors=True) as folder:
        Path(folder, "jax.py").write_text(_JAX.format(task=task, not_observed=NOT_OBSERVED))
        path = ":".join(filter(None, (folder, environ.get("PYTHONPATH", ""))))
        terminal = sys.stdin is not None and sys.stdin.isatty()  # a terminal stops a background job that reads it
        with process_group() as group:
            process = subprocess.Popen(
                command,
                env={**environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL if terminal else None,
                process_group=group,
            )
            stopped = _is_stopped(process, group, limit_s)
            os.killpg(group, signal.SIGKILL)
            process.wait()
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
        failed = Path(folder, NOT_OBSERVED)
        reason = (
            failed.read_text()
            if failed.exists()
            else "no process imported jax through PYTHONPATH, or it ended at once"
        )
    found.sort(key=lambda each: -sum(function["calls"] for function in each.get("functions", ())))
    code = process.returncode
    return Ran(128 - code if code < 0 else code, stopped, found, "" if found else reason)


def _is_stopped(process: subprocess.Popen[bytes], group: int, limit_s: float | None) -> bool:
    """Wait for the command; end the job at its time limit or at a signal. Returns whether the job was ended."""
    try:
        process.wait(limit_s)
        return False
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit) as cause:
        terminated = isinstance(cause, SystemExit)
        os.killpg(group, signal.SIGTERM if terminated else signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C ends the wait
            process.wait(_GRACE_S)
        if terminated:
            raise
        return True


def job_findings(ran: Ran) -> Iterator[Finding]:
    """All findings of an observed command. Of its processes, only the one with the most calls is judged."""
    yield from made({"the command": lambda: ended(ran)})
    if not ran.processes:
        yield Finding("unknown", ran.reason, name="the job")
        return
    process = ran.processes[0]
    step = step_of(process)
    yield from made(
        {
            "transfers to the host": lambda: lines(process, step, "fetch"),
            "transfers to the devices": lambda: lines(process, step, "place"),
            "waiting for input": lambda: lines(process, step, "input"),
            "recompilation": lambda: recompilation(process["compiled"]),
            "donation": lambda: donation(process["functions"]),
            "unrolled loops": lambda: unrolled_loops(process["functions"]),
            "memory that grows": lambda: growing_memory(process["steps"], process["growths"]),
            "GIL": lambda: gil(process["samples"]),
        }
    )
    if step and step["batch"]:
        yield from batch_findings([Leaf(**leaf) for leaf in step["batch"]])
    else:
        reason = "no compiled function was called in a loop with a new argument each time"
        yield Finding("unknown", reason, name="the batch")
    for where, why in process["failures"].items():
        yield Finding("unknown", f"failed: {why}", name=f"hook for {where}")


def ended(ran: Ran) -> Finding:
    return Finding(
        "error" if ran.code != 0 and not ran.stopped else "ok",
        "it was stopped before its end" if ran.stopped else f"it ended with exit code {ran.code}",
        "see its own messages above; the checks below cover the time before it failed",
        "the failure may be the cause of other findings",
    )


def step_of(process: Object) -> Object | None:
    """The training step: of the functions called in a loop, the one with most argument bytes. None: no loop."""
    looped = [function for function in process["functions"] if function["calls"] >= LOOP]
    return max(looped, key=lambda function: function["calls"] * (1 + function["argument_bytes"]), default=None)


_KINDS: Mapping[str, tuple[float, str, str]] = {
    "fetch": (
        0.05,
        "keep results on the devices, and fetch several at once with jax.device_get, at most every ten steps",
        "the next step is enqueued only after the devices have computed the value; until it arrives, they idle",
    ),
    "place": (
        0.01,  # the transfer itself takes longer, but this thread does not wait for it
        "use a feedline.Feed, or feedline.prefetch_to_mesh(batches, sharding): their threads place the batches",
        "the training thread copies the batch before it can enqueue the step, and the devices wait for it",
    ),
    "input": (
        0.05,
        "print(feed.report()) names the slow stage; feedline.prefetch_to_mesh(batches, sharding) reads ahead",
        "the devices idle until the batch arrives",
    ),
}
"""For each kind of activity: the share of the loop's time that makes it a warning; a fix; and the reason."""


def lines(process: Object, step: Object | None, kind: str) -> Finding:
    """The lines at which samples show this kind of activity, and their share of the loop's time."""
    large, fix, why = _KINDS[kind]
    if step and kind == "place" and step["numpy_bytes"]:
        size = in_bytes(step["numpy_bytes"])
        text = f"{step['name']} ({step['line']}) gets NumPy arrays, {size} in each call"
        return Finding("warning", text, fix, why)
    samples = process["samples"]
    if step is None or samples["samples"] < _MIN_SAMPLES:
        return Finding("unknown", _TOO_SHORT)
    found = [line for line in samples["lines"] if line["kind"] == kind]
    share = sum(line["share"] for line in found)
    # nothing is lost while the devices still have steps to do, as in a loop that prints every fiftieth loss
    idle = max(f["idle_share"] for f in process["functions"] if f["calls"] >= step["calls"] / 2)
    shown = [f"{line['line']} {line['text']} ({line['share']:.1%})" for line in found]
    return Finding(
        "warning" if share >= large and idle >= _IDLE_SHARE else "ok",
        f"{share:.1%} of the loop's time, in {samples['samples']:,} samples: {first_three(shown, '; ')}. Before "
        f"{idle:.0%} of the steps the devices had nothing left to do",
        fix,
        why,
    )


_TOO_SHORT = (
    "the loop was too short to sample (let it run for a few seconds), or no compiled function was called in a loop"
)


def recompilation(compiled: Sequence[Object]) -> Finding:
    """Whether functions were compiled again and again."""
    found = [each for each in compiled if each["times"] > 1 and (each["change"] or each["times"] > LOOP)]
    found.sort(key=lambda each: -each["seconds"])
    shown = [
        f"{each['name']} at {each['line']}: compiled again {each['times'] - 1} × ({each['seconds']:.2f} s)"
        + (f", {each['change']}" if each["change"] else "")
        for each in found
    ]
    return Finding(
        "ok" if not found else "warning" if max(each["times"] for each in found) > LOOP else "note",
        first_three(shown, "; "),
        "keep shapes and dtypes (last batch: remainder='pad' or 'drop'), call jax.jit once, before the loop, "
        "and pass values that change as arrays, not as static arguments",
        "the devices idle while a step is compiled",
    )


def donation(functions: Sequence[Object]) -> Finding:
    """Whether a function gets its own results back as arguments, and does not donate them."""
    found = [f for f in functions if sum(n >= _FED_BACK_BYTES for n in f["fed_back"]) >= LOOP - 1]
    shown = [f"{in_bytes(max(f['fed_back']))} from {f['name']} ({f['line']})" for f in found]
    return Finding(
        "warning" if found else "ok",
        f"results that came back as arguments, but were not donated: {first_three(shown)}",
        "jax.jit(..., donate_argnums=...) for the state, if nothing uses the old state afterwards",
        "the old and the new state are both in memory during a step; with donation the new one reuses the memory",
    )


def unrolled_loops(functions: Sequence[Object]) -> Finding:
    """Whether a Python loop was unrolled into a compiled function."""
    shown = [
        f"{f['name']} ({f['line']}) holds {found['repeats']} equal iterations of {found['body']} operations at "
        f"{found['loop']}"
        for f in functions
        if (found := f["unrolled"])
    ]
    return Finding(
        "warning" if shown else "ok",
        first_three(shown, "; "),
        "use jax.lax.scan over stacked parameters, or lax.fori_loop; for gradients, jax.checkpoint on the body",
        "the program holds a copy of each iteration, and for gradients all intermediate results are kept",
    )


def growing_memory(steps: int, growths: Sequence[Object]) -> Finding:
    """Whether memory grows with the steps."""
    if steps < _GROWTH_STEPS:
        return Finding("unknown", f"needs a loop of {_GROWTH_STEPS} steps, and {steps} were observed")
    grown = [g for g in growths if g["what"] != "host" or g["last"] - g["first"] >= _HOST_BYTES]
    return Finding(
        "warning" if grown else "ok",
        first_three([each["text"] for each in grown], "; "),
        "drop what refers to it: a list, a closure, a metric never fetched; feedline.trainer.MemoryWatch warns",
        "the job fails for lack of memory once it has run for long enough",
    )


def gil(samples: Object | None) -> Finding:
    """Whether other threads that run Python code hold up the training thread."""
    if samples is None or samples["samples"] < _MIN_SAMPLES:
        return Finding("unknown", _TOO_SHORT)
    busy = [thread for thread in samples["threads"] if thread["busy_share"] >= _BUSY_SHARE]
    shown = [f"thread {each['name']!r} was busy for {each['busy_share']:.0%} at {each['line']}" for each in busy]
    return Finding(
        "warning" if busy and samples["late_share"] >= _LATE_SHARE else "ok",
        f"{samples['late_share']:.0%} of {samples['samples']:,} waits for the GIL took over 3 ms; "
        f"{first_three(shown)}",
        "do that work in processes (Reading(workers=...)), or with libraries that release the GIL, such as NumPy",
        "only one thread at a time runs Python: the training thread waits for it, and enqueues steps late",
    )
