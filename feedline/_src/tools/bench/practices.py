"""Compares each practice of the trainer, such as bfloat16, on and off: time of a step, and memory on a device.

Each practice gets a process of its own, in which on and off are measured alternately, so that a slow minute of the
machine affects both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from feedline._src.tools.bench.machine import in_a_process
from feedline._src.tools.bench.modes import step_s
from feedline._src.tools.bench.workload import PRESETS, Workload, prepared
from feedline._src.trainer.loop import train
from feedline._src.trainer.modes import Practices

COLUMNS = "practice                workload     on ms   off ms   on ÷ off            on MiB  off MiB"
_REPORT_EVERY = 10
_STEPS_PER_CALL = 8
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train."""

    workload: Workload
    practices: Practices = Practices()  # noqa: RUF009  frozen
    steps_per_call: int = 1
    report_every: int = _REPORT_EVERY


@dataclasses.dataclass(frozen=True)
class Pair:
    """A practice on and off.

    Attributes:
      workload: "large": the preset; "4 × rows": the preset with four times as many rows, so that activations are
        a large part of the memory; "short": a small model, whose steps take a few milliseconds on CPUs.
    """

    workload: str
    on: Setup
    off: Setup


def pairs(large: Workload) -> dict[str, Pair]:
    """{practice: on and off}. Long steps hide the host's time, so practices that affect it get a small model."""
    short = PRESETS["short"]

    def of(off: Setup, name: str = "large", **on: Any) -> Pair:
        return Pair(name, dataclasses.replace(off, **on), off)

    def remat(policy: Literal["all", "cheap"]) -> Pair:
        many = dataclasses.replace(large, rows=4 * large.rows)
        return of(Setup(many), "4 × rows", workload=dataclasses.replace(many, remat=policy))

    plain, brief = Setup(large), Setup(short)
    no_donation, unguarded = Practices(donate_state=False), Practices(guard_transfers=False)
    return {
        "donate_state": Pair("large", plain, Setup(large, no_donation)),
        "remat_all": remat("all"),
        "remat_cheap": remat("cheap"),
        "bfloat16": of(plain, practices=Practices(compute="bfloat16")),
        "shard_state": of(plain, practices=Practices(shard_state=True)),
        "ship_uint8": of(plain, workload=dataclasses.replace(large, ship="uint8")),
        "steps_per_call": of(brief, "short", steps_per_call=_STEPS_PER_CALL),
        "metrics_together": Pair("short", brief, Setup(short, report_every=1)),
        "transfer_guard": Pair("short", brief, Setup(short, unguarded)),
    }


def practices(
    large: Workload, rounds: int, seconds: float, print_line: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """{practice: {"on": figures, "off": figures, "ratio": on ÷ off, "workload"}}."""
    print_line(COLUMNS)
    found = {}
    for name, pair in pairs(large).items():
        found[name] = in_a_process(measured, pair, rounds, seconds)
        print_line(line(name, found[name]))
    return found


def measured(pair: Pair, rounds: int, seconds: float) -> Figures:
    """Measure a practice on and off, alternately, in this process."""
    found: Figures = {"workload": pair.workload}
    with contextlib.ExitStack() as context:
        runs: dict[str, Callable[[float], float]] = {}
        setups = {"on": pair.on, "off": pair.off}
        for which, setup in setups.items():
            run, figures = context.enter_context(_ready(setup))
            runs[which], found[which] = run, {**figures, "step_ms_samples": []}
            run(0.0)  # compiles everything
        for k in range(rounds):
            for which in list(runs)[:: -1 if k % 2 else 1]:
                found[which]["step_ms_samples"].append(runs[which](seconds) * 1e3)
    samples = [found[which]["step_ms_samples"] for which in ("on", "off")]
    ratios = sorted(on / off for on, off in zip(*samples, strict=True))
    for which in ("on", "off"):
        found[which]["step_ms"] = statistics.median(found[which]["step_ms_samples"])
    return {**found, "ratio": statistics.median(ratios), "ratios": ratios}


@contextlib.contextmanager
def _ready(setup: Setup) -> Iterator[tuple[Callable[[float], float], Figures]]:
    """Yield a function (seconds) → mean time of a step, and the compiler's figures, such as bytes of memory."""
    workload, per_call = setup.workload.for_devices(), setup.steps_per_call
    with prepared(workload, "jit_multi", setup.practices, per_call) as (feed, program, figures):
        state = program.start()

        def run(seconds: float) -> float:
            nonlocal state
            calls, took_s = 4, 0.0
            while True:
                began = time.perf_counter()
                state, progress = train(
                    program,
                    state,
                    itertools.islice(feed, calls),
                    report_every=setup.report_every,
                    guard_transfers=setup.practices.guard_transfers,
                )
                took_s = time.perf_counter() - began
                if took_s >= seconds / 2:
                    return step_s(progress) if per_call == 1 else progress.elapsed_s / ((calls - 1) * per_call)
                calls = int(calls * min(100.0, 1.2 * seconds / took_s)) + 1

        yield run, figures


def line(name: str, found: Figures) -> str:
    """A line of the table under `COLUMNS`."""
    if "on" not in found:
        return f"{name:<24} {found['error']}"
    on, off = found["on"], found["off"]
    low, high = found["ratios"][0], found["ratios"][-1]
    # from the compiler: a device's own peak would cover on and off, which share a process
    mib = [each["compiled_bytes"]["total"] / 2**20 for each in (on, off)]
    return (
        f"{name:<24} {found['workload']:<8} {on['step_ms']:>8.2f} {off['step_ms']:>8.2f}   "
        f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}] {mib[0]:>8.1f} {mib[1]:>8.1f}"
    )
