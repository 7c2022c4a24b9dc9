"""What a source holds and the plan of a feed as JSON values, for `feedline inspect --json`."""

from __future__ import annotations

from typing import Any

from feedline._src.placement.plan import device_parts
from feedline._src.plan.plan import Plan
from feedline._src.tools.inspect.show import in_words, leaf_title, shown, spans
from feedline._src.tools.inspect.target import Target


def as_object(source: str, target: Target, plan: Plan) -> dict[str, Any]:
    """What --json prints. docs/inspect.md names the keys. Spans are [first, after the last]."""
    leaves, first = target.contents.metadata.spec.leaves, target.contents.first
    return {
        "source": source,
        "fits": not plan.problems,
        "problems": plan.problems,
        "rows": plan.rows,
        "lanes": plan.lanes,
        "row_bytes": sum(leaf.bytes for leaf in leaves),
        "leaves": [_form(leaf.name, leaf) for leaf in leaves],
        "first_rows": [
            {leaf_title(leaf.name): shown(values[row]) for leaf, values in zip(leaves, first, strict=True)}
            for row in range(len(first[0]))
        ],
        "mesh": dict(target.mesh.shape),
        "processes": plan.processes,
        "batch_size": plan.batch_size,
        "described_batch_size": plan.fitting_size,
        "batch": [{**_form(name, leaf), "spec": in_words(leaf.sharding)} for name, leaf in plan.leaves.items()],
        "reads": _reads(plan),
        "devices": _devices(plan),
        "ahead": plan.settings.buffer,
        "prefetch": plan.settings.prefetch,
        "memory": plan.memory._asdict(),
        "remainder": plan.remainder,
        "multiple_of": plan.multiple_of,
        "next_sizes": plan.next_sizes(),
        "epoch": None if plan.epoch is None else plan.epoch._asdict(),
        "sizes_that_leave_out_none": plan.whole_sizes(),
    }


def _form(name: str, leaf: Any) -> dict[str, Any]:
    return {"leaf": leaf_title(name), "dtype": leaf.dtype.name, "shape": list(leaf.shape)}


def _reads(plan: Plan) -> list[dict[str, Any]]:
    """What each process supplies."""
    return [
        {
            "process": reads.process,
            "devices": reads.devices,
            "rows": spans(reads.rows),
            **({"lanes": reads.lanes} if plan.lanes else {}),
            "local_bytes": reads.local_bytes,
            "read_bytes": reads.read_bytes,
            "leaves": {
                leaf_title(name): {
                    "rows": spans(leaf.rows),
                    "columns": [spans(axis) for axis in leaf.column_indices],
                }
                for name, leaf in reads.leaves.items()
            },
        }
        for reads in plan.reads
    ]


def _devices(plan: Plan) -> list[dict[str, Any]]:
    """What each device holds."""
    holds: dict[int, dict[str, Any]] = {}
    for name, leaf in plan.leaves.items():
        for device, index in device_parts(leaf.sharding, leaf.shape).items():
            rows, *columns = [list(part.indices(size)[:2]) for part, size in zip(index, leaf.shape, strict=True)]
            holds.setdefault(device, {})[leaf_title(name)] = {"rows": rows, "columns": columns}
    return [
        {"device": device, "process": reads.process, "leaves": holds[device]}
        for reads in plan.reads
        for device in reads.devices
        if device in holds
    ]
