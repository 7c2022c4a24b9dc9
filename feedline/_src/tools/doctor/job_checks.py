"""Checks of a job: decides from what was observed in its process. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor.batches import Leaf, Values, batch_checks
from feedline._src.tools.doctor.check import Check, Severity, attempt, judged, unknown
from feedline._src.tools.doctor.job import Ran

Object = Mapping[str, Any]
_LOOP = 3
"""Calls of a function from which it counts as a step of a loop, and compilations that are many."""
_MIN_SAMPLES = 40
_LARGE_SHARE = 0.05
"""A share of the loop's time that is a warning."""
_DRY_SHARE = 0.5
"""A share of the steps before which the devices idle: below it, the training thread is fast enough."""
_TOO_SHORT = "the loop was too short to sample, or no compiled function was called in one"
_GROWTH_STEPS, _HOST_BYTES = 60, 64 << 20
_WHOLE_SHARE = 0.5
_FED_BACK_BYTES = 64 << 10
_LATE_SHARE, _BUSY_SHARE = 0.08, 0.2
_MAX_LISTED = 3


def command_checks(ran: Ran) -> Iterator[Check]:
    """All checks of a command that was observed. Of several processes, that with most calls is looked at."""
    failed = ran.code != 0 and not ran.stopped
    yield judged(
        "the command",
        "error" if failed else "ok",
        "it was stopped before its end" if ran.stopped else f"it ended with exit code {ran.code}",
        "see its own messages above; the checks below are about the time before",
        "what failed may be the reason for other findings",
        exit_code=ran.code,
        stopped=ran.stopped,
        observed_processes=len(ran.processes),
    )
    if ran.processes:
        yield from job_checks(ran.processes[0])
    else:
        yield unknown("the job", ran.reason)


def job_checks(process: Object) -> Iterator[Check]:
    """All checks of one process, from what `inside.record` wrote."""
    checks: Mapping[str, Callable[[Object], Check]] = {
        "transfers to the host": check_fetches,
        "transfers to the devices": check_placing,
        "waiting for input": check_input,
        "recompilation": check_compilations,
        "pmap": check_pmap,
        "donation": check_donation,
        "unrolled loops": check_unrolled,
        "memory that grows": check_growth,
        "fragmentation of device memory": check_fragmentation,
        "GIL": check_gil,
    }
    for name, check in checks.items():
        yield attempt(name, lambda check=check: check(process))  # type: ignore[misc]
    step = step_of(process)
    leaves = [Leaf(**{**leaf, "values": Values(**leaf["values"])}) for leaf in step["batch"]] if step else []
    if leaves:
        yield from batch_checks(leaves)
    else:
        for name in ("sharding of the batch", "dtypes of the batch", "number of leaves"):
            yield unknown(name, "no compiled function was called in a loop with a new argument each time")
    for where, why in process["failures"].items():
        yield unknown(f"hook for {where}", f"failed: {why}")


def step_of(process: Object) -> Object | None:
    """The function that is taken for the training step: called in a loop, with most bytes. None without one."""
    looped = [function for function in process["functions"] if function["calls"] >= _LOOP]
    return max(looped, key=lambda function: function["calls"] * (1 + function["argument_bytes"]), default=None)


def check_fetches(process: Object) -> Check:
    """Whether the training thread waits for values of the devices, and leaves them without work."""
    return _check_lines(
        "transfers to the host",
        "fetch",
        process,
        "keep results on the devices and fetch them every ten steps or more, several at once by jax.device_get",
        "to fetch a value, the training thread waits until the devices have computed it, and only then "
        "enqueues the next step: meanwhile the devices idle",
    )


def check_input(process: Object) -> Check:
    """Whether the training thread waits for the next batch, and leaves the devices without work."""
    return _check_lines(
        "waiting for input",
        "input",
        process,
        "print(feed.report()) says which stage of a feedline.Feed is slow, and what to change; wrap another "
        "iterator: feedline.prefetch_to_mesh(batches, sharding)",
        "the devices idle until the batch is there",
    )


def check_placing(process: Object) -> Check:
    """Whether the training thread itself transfers the batches: by jax.device_put, or as NumPy arguments."""
    name, step = "transfers to the devices", step_of(process)
    fix = (
        "iterate over a feedline.Feed, or over feedline.prefetch_to_mesh(batches, sharding): another thread "
        "places the next batches meanwhile"
    )
    why = "the training thread copies the batch before it can enqueue the step, and the devices wait for it"
    if step is None or not step["numpy_bytes"]:
        return _check_lines(name, "place", process, fix, why, each_step="warning")
    size = in_bytes(step["numpy_bytes"])
    finding = f"{step['called_from']} passes NumPy arrays to {step['name']}, {size} in each call"
    return judged(name, "warning", finding, fix, why, numpy_bytes=step["numpy_bytes"])


def _check_lines(name: str, kind: str, process: Object, fix: str, why: str, each_step: Severity = "note") -> Check:
    """The lines at which the training thread was sampled, and their share of the loop's time.

    Nothing is lost while the devices still have steps to do, as in a loop that prints every fiftieth loss.

    Args:
      each_step: the severity if a line takes little time, but is reached in each step.
    """
    samples, step = process["samples"], step_of(process)
    if step is None or samples is None or samples["samples"] < _MIN_SAMPLES:
        return unknown(name, _TOO_SHORT)
    profiled = samples["profiled_steps"]
    lines = [line for line in samples["lines"] if line["kind"] == kind]
    always = [line for line in lines if line["profiled_steps"] == profiled > 1]
    share = sum(line["share"] for line in lines)
    dry = max(f["dry_share"] for f in process["functions"] if f["calls"] >= step["calls"] / 2)
    severity: Severity = "warning" if share >= _LARGE_SHARE else each_step if always else "ok"
    listed = "; ".join(
        f"{line['line']} {line['text']} ({line['share']:.1%}{', in each step' if line in always else ''})"
        for line in lines[:_MAX_LISTED]
    )
    more = f"; and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    return judged(
        name,
        severity if dry >= _DRY_SHARE else "ok",
        f"{share:.1%} of the loop's time, in {samples['samples']:,} samples: {listed}{more}. Before {dry:.0%} of "
        "the steps the devices had nothing left to do",
        fix,
        why,
        share=share,
        idle_devices_share=dry,
        lines=lines,
    )


class Again(NamedTuple):
    """Something that was compiled again: what, how often after the first time, for how long, and why."""

    what: str
    times: int
    seconds: float
    change: str


def check_compilations(process: Object) -> Check:
    """Whether functions were compiled again and again."""
    found = sorted(_compiled_again(process), key=lambda again: again.seconds, reverse=True)
    count, seconds = sum(again.times for again in found), sum(again.seconds for again in found)
    listed = "; ".join(
        f"{again.what} was compiled {'once' if again.times == 1 else f'{again.times} times'} more "
        f"({again.seconds:.2f} s): {again.change}"
        for again in found[:_MAX_LISTED]
    )
    more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return judged(
        "recompilation",
        "warning" if count >= _LOOP else "note" if found else "ok",
        listed + more or "each function was compiled once",
        "keep shapes and dtypes the same (pad the last batch: remainder='pad', or 'drop'), make the function once "
        "outside of the loop, and pass values that change as arrays, not as static arguments",
        "the devices idle while a step is compiled",
        compiled_again=count,
        seconds=seconds,
        functions=[again._asdict() for again in found],
    )


def _compiled_again(process: Object) -> Iterator[Again]:
    for f in process["functions"]:
        what = f"{f['name']} ({f['line']})"
        if f["compiled_again"]:
            unchanged = "no argument had changed: look at settings of jax, and at static arguments that differ"
            yield Again(what, f["compiled_again"], f["compiled_again_s"], f["change"] or unchanged)
        if f["made"] >= _LOOP:
            change = "jax.jit was called again there, which makes a new function"
            yield Again(what, f["made"] - 1, f["made_again_s"], change)
    often = [each for each in process["operations"] if each["count"] >= _LOOP]
    for line in dict.fromkeys(each["line"] for each in often):
        same = [each for each in often if each["line"] == line]
        names = ", ".join(each["name"] for each in same[:_MAX_LISTED])
        yield Again(
            f"{line} ({names}, outside of a compiled function)",
            sum(each["count"] - 1 for each in same),
            sum(each["seconds"] * (1 - 1 / each["count"]) for each in same),
            "the arguments had other shapes",
        )


def check_pmap(process: Object) -> Check:
    """Whether the job uses jax.pmap."""
    lines = sorted({function["line"] for function in process["functions"] if function["is_pmap"]})
    return judged(
        "pmap",
        "note" if lines else "ok",
        f"jax.pmap at {', '.join(lines[:_MAX_LISTED])}" if lines else "not used",
        'use jax.jit with the batch sharded: NamedSharding(mesh, PartitionSpec("data")); the state is then one '
        "array, not one for each device",
        "jax.pmap is jit of shard_map now and no faster; it needs a leading axis of the devices, and replicates "
        "each argument that it does not map",
        lines=lines,
    )


def check_donation(process: Object) -> Check:
    """Whether a function gets its own results back without donating them."""
    kept = [f for f in process["functions"] if sum(n >= _FED_BACK_BYTES for n in f["fed_back"]) >= _LOOP - 1]
    if not kept:
        return judged("donation", "ok", "no large result came back as an argument without being donated")
    worst = max(kept, key=_most_fed_back)
    times = sum(n > 0 for n in worst["fed_back"])
    return judged(
        "donation",
        "warning",
        f"{worst['name']} ({worst['line']}) got {in_bytes(_most_fed_back(worst))} of its results back as "
        f"arguments in {times} of {len(worst['fed_back'])} calls that were looked at, and did not donate them",
        "jax.jit(..., donate_argnums=...) with the number of the state's argument, if nothing uses the old state "
        "afterwards",
        "the old and the new state are both in memory during the step; with donation the new one takes its place",
        functions=[{"name": f["name"], "line": f["line"], "fed_back_bytes": _most_fed_back(f)} for f in kept],
    )


def _most_fed_back(function: Object) -> int:
    most: int = max(function["fed_back"])
    return most


def check_unrolled(process: Object) -> Check:
    """Whether a Python loop was unrolled into a compiled function."""
    found = [function for function in process["functions"] if function["unrolled"]]
    if not found:
        return judged("unrolled loops", "ok", "no long chain of equal iterations in a program")
    worst = max(found, key=lambda function: function["unrolled"]["repeats"] * function["unrolled"]["body"])
    loop = worst["unrolled"]
    return judged(
        "unrolled loops",
        "warning",
        f"{worst['name']} ({worst['line']}) holds {loop['repeats']} equal iterations of {loop['body']} operations"
        f"{' at ' + loop['line'] if loop['line'] else ''}; {loop['equations']:,} operations altogether, compiled "
        f"in {worst['compile_s']:.1f} s",
        "jax.lax.scan over stacked parameters, or lax.fori_loop; for gradients with jax.checkpoint on the body",
        "a Python loop is copied into the program once for each iteration: compilation and the program grow with "
        "it, and for gradients all intermediate results are kept",
        functions=[{"name": f["name"], "line": f["line"], **f["unrolled"]} for f in found],
    )


def check_growth(process: Object) -> Check:
    """Whether memory grows with the steps."""
    name, memory = "memory that grows", process["memory"]
    steps = memory["steps"] if memory else 0
    if steps < _GROWTH_STEPS:
        return unknown(name, f"needs a loop of {_GROWTH_STEPS} steps, and {steps} were observed")
    grown = [g for g in memory["growths"] if g["what"] != "host" or g["last"] - g["first"] >= _HOST_BYTES]
    return judged(
        name,
        "warning" if grown else "ok",
        "; ".join(each["text"] for each in grown[:_MAX_LISTED]) or f"nothing grew in {steps:,} steps",
        "drop what refers to it: a list, a closure, or a metric that is never fetched. "
        "feedline.trainer.MemoryWatch watches it during a long run",
        "the job fails for lack of memory once it has run for long enough",
        steps=steps,
        growths=grown,
    )


def check_fragmentation(process: Object) -> Check:
    """Whether the free memory of the devices lies in many pieces."""
    name, needed = "fragmentation of device memory", {"bytes_limit", "bytes_in_use", "largest_free_block_bytes"}
    devices = [
        (stats["largest_free_block_bytes"], stats["bytes_limit"] - stats["bytes_in_use"])
        for stats in (process["memory"] or {}).get("allocators", [])
        if stats and needed <= stats.keys()
    ]
    if not devices:
        return unknown(name, "no device reported its free blocks")
    shares = [largest / max(1, free) for largest, free in devices]
    worst = min(range(len(devices)), key=shares.__getitem__)
    largest, free = devices[worst]
    return judged(
        name,
        "ok" if shares[worst] >= _WHOLE_SHARE else "note",
        f"device {worst}: the largest free block has {in_bytes(largest)} of {in_bytes(free)} free",
        "allocate large arrays first, donate the state, keep shapes the same, and leave preallocation on",
        "an array needs one block: a program may fail for lack of memory while enough is free",
        largest_share=shares,
    )


def check_gil(process: Object) -> Check:
    """Whether other threads that compute in Python hold the training thread up."""
    name, samples = "GIL", process["samples"]
    if samples is None or samples["samples"] < _MIN_SAMPLES:
        return unknown(name, _TOO_SHORT)
    busy: Sequence[Object] = [thread for thread in samples["threads"] if thread["busy_share"] >= _BUSY_SHARE]
    is_held = bool(busy) and samples["late_share"] >= _LATE_SHARE
    listed = "; ".join(
        f"thread {thread['name']!r} was busy for {thread['busy_share']:.0%} of the time at {thread['line']}"
        for thread in sorted(busy, key=lambda thread: -thread["busy_share"])[:_MAX_LISTED]
    )
    return judged(
        name,
        "warning" if is_held else "ok",
        f"of {samples['samples']:,} tries to get the GIL {samples['late_share']:.0%} took more than 3 ms"
        + (f"; {listed}" if is_held else ""),
        "do that work in processes (Reading(workers=...)), or with libraries that release the GIL, as NumPy does "
        "for large arrays; or once, before training",
        "only one thread at a time runs Python: the training thread waits for the GIL each time it calls jax, and "
        "enqueues steps late",
        late_share=samples["late_share"],
        threads=busy,
    )
