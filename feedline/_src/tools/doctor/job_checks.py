"""Checks of a job: decides from what was observed in its process. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from feedline._src.tools.doctor.batches import Leaf, Values, batch_checks
from feedline._src.tools.doctor.check import Check, attempt, size, unknown
from feedline._src.tools.doctor.compilations import check_compilations
from feedline._src.tools.doctor.functions import check_donation, check_pmap, check_unrolled
from feedline._src.tools.doctor.job import Ran

Object = Mapping[str, Any]
_LOOP = 3
"""Calls of a function from which it counts as a step of a loop."""
_SOME_STEPS = 10
_WAIT_SHARE = 0.05
_HOST_BYTES = 64 << 20
_WHOLE_SHARE = 0.5
_GROWTH_STEPS = 60
_LATE_SHARE, _BUSY_SHARE, _PROBES = 0.08, 0.2, 20
_MOST_LISTED = 3


def command_checks(ran: Ran) -> Iterator[Check]:
    """All checks of a command that was observed. Of several processes, that with most calls is looked at."""
    name = "the command"
    measured = {"exit_code": ran.code, "stopped": ran.stopped, "observed_processes": len(ran.processes)}
    if ran.code and not ran.stopped:
        yield Check(
            name,
            "error",
            f"it ended with exit code {ran.code}",
            "see its own messages above; the checks below are about the time before",
            "what failed may be the reason for other findings",
            measured,
        )
    else:
        end = "it was stopped before its end" if ran.stopped else "it ended with exit code 0"
        yield Check(name, "ok", end, "", "", measured)
    if ran.processes:
        yield from job_checks(ran.processes[0])
    else:
        yield unknown("the job", ran.reason)


def job_checks(process: Object) -> Iterator[Check]:
    """All checks of one process, from what `inside.record` wrote."""
    step = step_of(process)
    checks: Sequence[tuple[str, Callable[[], Check]]] = (
        ("transfers to the host", lambda: check_fetches(process, step)),
        ("transfers to the devices", lambda: check_placing(process, step)),
        ("recompilation", lambda: check_compilations(process)),
        ("pmap", lambda: check_pmap(process)),
        ("donation", lambda: check_donation(process)),
        ("unrolled loops", lambda: check_unrolled(process)),
        ("memory that grows", lambda: check_growth(process)),
        ("fragmentation of device memory", lambda: check_fragmentation(process)),
        ("interpreter's lock", lambda: check_lock(process)),
    )
    for name, check in checks:
        yield attempt(name, check)
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


def check_fetches(process: Object, step: Object | None) -> Check:
    """Whether the loop waits for the devices in each step."""
    name = "transfers to the host"
    often = _often([move for move in process["moves"] if move["kind"] in ("to host", "wait")], step)
    if step is None:
        return unknown(name, "no compiled function was called in a loop")
    if not often:
        return Check(name, "ok", f"none in each of {step['calls']:,} steps")
    total = sum(move["seconds"] for move in often)
    share = total / step["seconds"] if step["seconds"] else 0.0
    return Check(
        name,
        "warning" if share >= _WAIT_SHARE else "note",
        f"{_listed(often)}. The loop waited there for {total:.2f} s of {step['seconds']:.2f} s ({share:.0%})",
        "keep results on the devices and fetch them every ten steps or more, several at once by jax.device_get",
        "to fetch a value, the training thread waits until the devices have computed it, and only then "
        "enqueues the next step: meanwhile the devices idle",
        {"lines": often, "seconds": total, "share": share},
    )


def check_placing(process: Object, step: Object | None) -> Check:
    """Whether the training thread itself transfers the batches."""
    name = "transfers to the devices"
    often = _often([move for move in process["moves"] if move["kind"] == "to device"], step)
    if step is None:
        return unknown(name, "no compiled function was called in a loop")
    if not often:
        return Check(name, "ok", f"none by the training thread in each of {step['calls']:,} steps")
    return Check(
        name,
        "warning",
        f"{_listed(often)}, by the training thread",
        "iterate over a feedline.Feed, or over feedline.prefetch_to_mesh(batches, sharding): another thread "
        "places the next batches meanwhile",
        "the training thread copies the batch before it can enqueue the step, and the devices wait for it",
        {"lines": often, "bytes": sum(move["bytes"] for move in often)},
    )


def _often(moves: Sequence[Object], step: Object | None) -> list[Object]:
    """Those of at least every second step, the longest first."""
    least = max(_SOME_STEPS, (step["calls"] if step else 0) / 2)
    found = [move for move in moves if move["count"] >= least]
    return sorted(found, key=lambda move: (move["seconds"], move["bytes"]), reverse=True)


def _listed(moves: Sequence[Object]) -> str:
    told = []
    for move in moves[:_MOST_LISTED]:
        moved = f", {size(move['bytes'])}" if move["bytes"] else ""
        seconds = f", {move['seconds']:.2f} s" if move["seconds"] >= 0.005 else ""
        told.append(f"{move['line']} {move['what']} {move['count']:,} times{moved}{seconds}")
    return "; ".join(told) + (f"; and {len(moves) - _MOST_LISTED} more" if len(moves) > _MOST_LISTED else "")


def check_growth(process: Object) -> Check:
    """Whether memory grows with the steps."""
    name, growth = "memory that grows", process.get("growth", {"steps": 0})
    if growth["steps"] < _GROWTH_STEPS:
        return unknown(name, f"needs a loop of {_GROWTH_STEPS} steps, and {growth['steps']} were observed")
    grown = [g for g in growth["growths"] if g["what"] != "host" or g["last"] - g["first"] >= _HOST_BYTES]
    if not grown:
        return Check(name, "ok", f"nothing grew in {growth['steps']:,} steps", "", "", {"steps": growth["steps"]})
    return Check(
        name,
        "warning",
        "; ".join(each["text"] for each in grown[:_MOST_LISTED]),
        "drop what refers to it: a list, a closure, or a metric that is never fetched. "
        "feedline.trainer.MemoryWatch watches it during a long run",
        "the job fails for lack of memory once it has run for long enough",
        {"steps": growth["steps"], "growths": grown},
    )


def check_fragmentation(process: Object) -> Check:
    """Whether the free memory of the devices lies in many pieces."""
    name = "fragmentation of device memory"
    needed = {"bytes_limit", "bytes_in_use", "largest_free_block_bytes"}
    told = [stats for stats in process.get("growth", {}).get("allocators", []) if stats and needed <= stats.keys()]
    if not told:
        return unknown(name, "no device reported its free blocks")
    whole = [
        stats["largest_free_block_bytes"] / max(1, stats["bytes_limit"] - stats["bytes_in_use"]) for stats in told
    ]
    worst = min(range(len(told)), key=whole.__getitem__)
    free = told[worst]["bytes_limit"] - told[worst]["bytes_in_use"]
    finding = f"the largest free block has {size(told[worst]['largest_free_block_bytes'])} of {size(free)} free"
    measured = {"largest_share": whole}
    if whole[worst] >= _WHOLE_SHARE:
        return Check(name, "ok", finding, "", "", measured)
    return Check(
        name,
        "note",
        f"device {worst}: {finding}",
        "allocate large arrays first, donate the state, keep shapes the same, and leave preallocation on",
        "an array needs one block: a program may fail for lack of memory while enough is free",
        measured,
    )


def check_lock(process: Object) -> Check:
    """Whether threads that compute in Python hold the training thread up."""
    name, probe = "interpreter's lock", process.get("probe")
    if not probe or probe["samples"] < _PROBES:
        return unknown(name, "the loop was too short to measure")
    others = [thread for thread in probe["threads"] if not thread["main"] and thread["busy_share"] >= _BUSY_SHARE]
    finding = (
        f"of {probe['samples']:,} tries to get the lock {probe['late_share']:.0%} took more than 3 ms, a "
        f"tenth of them {probe['p90_ms']:.1f} ms and more"
    )
    if not others or probe["late_share"] < _LATE_SHARE:
        return Check(name, "ok", finding, "", "", dict(probe))
    others.sort(key=lambda thread: -thread["busy_share"])
    told = "; ".join(
        f"thread {thread['name']!r} was busy for {thread['busy_share']:.0%} of the time at {thread['line']}"
        for thread in others[:_MOST_LISTED]
    )
    return Check(
        name,
        "warning",
        f"{finding}; {told}",
        "do that work in processes (Reading(workers=...)), or with libraries that release the lock, as NumPy does "
        "for large arrays; or once, before training",
        "only one thread at a time runs Python: the training thread waits for the lock each time it calls jax, "
        "and enqueues steps late",
        dict(probe),
    )
