"""Checks of compiled functions: pmap, donation, and loops that were unrolled. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedline._src.tools.doctor.check import Check, size

Object = Mapping[str, Any]
_LOOP = 3
_FED_BACK_BYTES = 64 << 10
_MOST_LISTED = 3


def check_pmap(process: Object) -> Check:
    """Whether the job uses jax.pmap."""
    lines = sorted(process["pmaps"])
    if not lines:
        return Check("pmap", "ok", "not used")
    return Check(
        "pmap",
        "note",
        f"jax.pmap at {', '.join(lines[:_MOST_LISTED])}",
        'use jax.jit with the batch sharded: NamedSharding(mesh, PartitionSpec("data")); the state is then one '
        "array, not one for each device",
        "jax.pmap is jit of shard_map now and no faster; it needs a leading axis of the devices, and replicates "
        "each argument that it does not map",
        {"lines": lines},
    )


def check_donation(process: Object) -> Check:
    """Whether a function gets its own results back without donating them."""
    kept = [
        function
        for function in process["functions"]
        if function["fed_back_calls"] >= _LOOP and function["fed_back_bytes"] >= _FED_BACK_BYTES
    ]
    if not kept:
        return Check("donation", "ok", "no large result came back as an argument without being donated")
    worst = max(kept, key=lambda function: function["fed_back_bytes"])
    return Check(
        "donation",
        "warning",
        f"{worst['name']} ({worst['line']}) got {size(worst['fed_back_bytes'])} of its results back as arguments "
        f"in {worst['fed_back_calls']:,} of {worst['calls']:,} calls, and did not donate them",
        "jax.jit(..., donate_argnums=...) with the number of the state's argument, if nothing uses the old state "
        "afterwards",
        "the old and the new state are both in memory during the step; with donation the new one takes its place",
        {"functions": [_only(f, "name", "line", "fed_back_bytes") for f in kept]},
    )


def check_unrolled(process: Object) -> Check:
    """Whether a loop of Python was unrolled into a compiled function."""
    found = [function for function in process["functions"] if function["unrolled"]]
    if not found:
        return Check("unrolled loops", "ok", "no long chain of equal iterations in a program")
    worst = max(found, key=lambda function: function["unrolled"]["repeats"] * function["unrolled"]["body"])
    loop = worst["unrolled"]
    where = f" at {loop['line']}" if loop["line"] else ""
    compile_s = worst["compilations"][0]["seconds"] if worst["compilations"] else 0.0
    return Check(
        "unrolled loops",
        "warning",
        f"{worst['name']} ({worst['line']}) holds {loop['repeats']} equal iterations in a row, of "
        f"{loop['body']} operations{where}; {loop['equations']:,} operations altogether, compiled in "
        f"{compile_s:.1f} s",
        "jax.lax.scan over stacked parameters, or lax.fori_loop; for gradients with jax.checkpoint on the body",
        "a Python loop is copied into the program once for each iteration: compilation and the program grow with "
        "it, and for gradients all intermediate results are kept",
        {"functions": [{**_only(f, "name", "line"), **f["unrolled"]} for f in found]},
    )


def _only(found: Object, *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names}
