"""Compares the three modes of the trainer: time, memory, compilation.

Each mode has its own process, because a device's peak memory is never reset, and a mode may run out of memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.feed import Feed
from feedline._src.tools.bench.machine import device_peak, in_a_process
from feedline._src.tools.bench.workload import Workload, prepared
from feedline._src.trainer.loop import Progress, train
from feedline._src.trainer.modes import Mode, Program, mesh_for

MODES: tuple[Mode, ...] = get_args(Mode)
COLUMNS = "mode           rows  step ms   fed ms     rows/s   of matmul     peak MiB  compiled MiB  compile s"
_COMPARED = 10  # steps whose losses are compared
_PRODUCTS = 8  # matrix products in one call
Figures = dict[str, Any]


def modes(
    workload: Workload, rounds: int, seconds: float, print_line: Callable[[str], None]
) -> dict[str, Figures]:
    """{mode: its figures, and under "doubled" its figures with twice the rows per batch}.

    Each round measures each mode once; every second round reverses the order. Times are medians over the rounds.
    """
    found: dict[Mode, list[Figures]] = {mode: [] for mode in MODES}
    print_line(COLUMNS)
    for k in range(rounds):
        for mode in MODES[:: -1 if k % 2 else 1]:
            found[mode].append(in_a_process(measured, workload, mode, seconds))
    merged: dict[str, Figures] = {mode: _merged(of_rounds) for mode, of_rounds in found.items()}
    for name, figures in merged.items():
        for each in (figures, figures.get("doubled")):
            if each is not None:
                print_line(line(name, each))
    return merged


def measured(workload: Workload, mode: Mode, seconds: float) -> Figures:
    """Measure a mode in this process."""
    workload = workload.for_devices()
    twice = dataclasses.replace(workload, rows=2 * workload.rows)
    figures, doubled = (batch_figures(each, mode, seconds) for each in (workload, twice))
    return {"devices": mesh_for(mode).size, **figures, "doubled": doubled}


def batch_figures(workload: Workload, mode: Mode, seconds: float) -> Figures:
    """Memory and times for one batch size. If there are no times, "error" says why."""
    with prepared(workload, mode) as (feed, program, found):
        try:
            found |= _times(workload, program, feed, seconds)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {**found, "error": "ran out of memory"}
    return {**found, "peak_bytes": device_peak()}


def _times(workload: Workload, program: Program, feed: Feed, seconds: float) -> Figures:
    losses: list[float] = []

    def report(progress: Progress) -> None:
        losses.append(progress.loss)

    state, _ = train(program, program.start(), itertools.islice(feed, _COMPARED), report=report, report_every=1)
    batch = next(feed)
    state, probed = train(program, state, itertools.repeat(batch, 4))
    steps = 1 + max(4, round(seconds / step_s(probed)))
    state, resident = train(program, state, itertools.repeat(batch, steps))
    state, fed = train(program, state, itertools.islice(feed, steps))
    rate = _product_rate(workload, program, batch["x"], seconds / 2)
    return {
        "step_ms": step_s(resident) * 1e3,
        "fed_step_ms": step_s(fed) * 1e3,
        "rows_per_s": workload.rows / step_s(fed),
        "wait_share": fed.wait_share,
        "flops": workload.flops,
        "matmul_flops_per_s": rate,
        "of_matmul": workload.flops / step_s(resident) / rate,
        "losses": losses,
    }


def step_s(progress: Progress) -> float:
    """The mean time of a step, without the first step."""
    return progress.elapsed_s / (progress.step - progress.resumed - 1)


def _product_rate(workload: Workload, program: Program, x: jax.Array, seconds: float) -> float:
    """Measure the matrix product of one hidden layer alone, in floating-point operations per second."""
    everywhere = NamedSharding(program.mesh, P())
    signal = jax.jit(lambda x: jnp.ones((len(x), workload.width)), out_shardings=x.sharding)(x)
    kernel = jax.jit(lambda: jnp.full((workload.width,) * 2, 1 / workload.width), out_shardings=everywhere)()
    many = jax.jit(lambda y, w: jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: y @ w, y))
    many(signal, kernel).block_until_ready()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or fastest == float("inf"):
        began = time.perf_counter()
        many(signal, kernel).block_until_ready()
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * workload.rows * workload.width**2 * _PRODUCTS / fastest


def _merged(rounds: list[Figures]) -> Figures:
    """The figures of the first round; figures that vary between rounds are replaced by their medians."""
    first = rounds[0]
    if "step_ms" in first:
        for name in ("step_ms", "fed_step_ms", "rows_per_s", "wait_share", "of_matmul", "compile_s"):
            samples = [each[name] for each in rounds if name in each]
            first[name], first[f"{name}_samples"] = statistics.median(samples), samples
    if "doubled" in first:
        first["doubled"] = _merged([each["doubled"] for each in rounds if "doubled" in each])
    return first


def line(mode: str, found: Figures) -> str:
    """A line of the table under `COLUMNS`."""
    if "rows" not in found:
        return f"{mode:<11} {found['error']}"
    compiled_mib = found["compiled_bytes"]["total"] / 2**20
    if "error" in found:
        needs = f"a step needs {compiled_mib:,.0f} MiB, says the compiler"
        return f"{mode:<11} {found['rows']:>7,}  {found['error']}: {needs}"
    peak = "–" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:,.1f}"
    return (
        f"{mode:<11} {found['rows']:>7,} {found['step_ms']:>8.2f} {found['fed_step_ms']:>8.2f} "
        f"{found['rows_per_s']:>10,.0f} {found['of_matmul']:>11.0%} {peak:>12} {compiled_mib:>13,.1f} "
        f"{found['compile_s']:>10.1f}"
    )


def remarks(found: dict[str, Figures]) -> list[str]:
    """The lines below the table: ratios between the modes."""
    lines = []
    if found["jit_multi"].get("devices") == 1:
        lines.append("there is one device, so jit_multi and pmap split nothing; --cpu-devices 8 makes a mesh")
    if all("step_ms" in found[mode] for mode in ("jit_multi", "pmap")):
        pairs = zip(*(found[mode]["step_ms_samples"] for mode in ("jit_multi", "pmap")), strict=False)
        ratio = statistics.median(multi / pmap for multi, pmap in pairs)
        lines.append(f"a step in jit_multi takes {ratio:.2f} times as long as in pmap")
        apart = max(
            abs(a - b) / abs(b)
            for figures in found.values()
            for a, b in zip(figures.get("losses", ()), found["pmap"]["losses"], strict=False)
        )
        lines.append(
            f"the losses of the first {_COMPARED} steps differ between modes by {apart:.1e} of their value"
        )
    return lines
