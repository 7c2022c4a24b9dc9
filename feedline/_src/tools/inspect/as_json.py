"""The description as JSON values, for `feedline inspect --json`."""

from __future__ import annotations

from typing import Any

import jax

from feedline._src.pipeline.settings import first_settings
from feedline._src.rows.spec import Leaf
from feedline._src.tools.inspect.contents import Contents, row_bytes, shown
from feedline._src.tools.inspect.description import Description
from feedline._src.tools.inspect.reads import ProcessReads, column_spans, spans
from feedline._src.tools.inspect.sizes import Epoch, next_sizes, whole_sizes
from feedline._src.tools.inspect.words import in_words, leaf_title


def as_object(description: Description, source: str) -> dict[str, Any]:
    """What --json prints. docs/inspect.md names the keys. Spans are [first, after the last]."""
    options = description.options
    return {
        "source": source,
        "fits": not description.problems,
        "problems": description.problems,
        **_contents(description.contents),
        "mesh": description.axes,
        "processes": description.processes,
        "batch_size": options.first_batch_size,
        "described_batch_size": description.described_size,
        "batch": [
            {**_form(name, leaf), "spec": in_words(leaf.sharding)}
            for name, leaf in zip(description.names, description.batch, strict=True)
        ],
        "reads": [_reads(description, each) for each in description.reads],
        "devices": _devices(description),
        "ahead": description.ahead,
        "prefetch": first_settings(options).prefetch,
        "memory": description.memory._asdict(),
        "remainder": options.remainder,
        **_epochs(description),
    }


def _contents(contents: Contents) -> dict[str, Any]:
    leaves = contents.spec.leaves
    return {
        "rows": contents.rows,
        "lanes": contents.lanes,
        "row_bytes": row_bytes(contents.spec),
        "leaves": [_form(leaf.name, leaf) for leaf in leaves],
        "first_rows": [
            {
                leaf_title(leaf.name): shown(values[row])
                for leaf, values in zip(leaves, contents.first, strict=True)
            }
            for row in range(len(contents.first[0]))
        ],
    }


def _form(name: str, leaf: Leaf | jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"leaf": leaf_title(name), "dtype": leaf.dtype.name, "shape": list(leaf.shape)}


def _reads(description: Description, reads: ProcessReads) -> dict[str, Any]:
    parts = zip(description.names, reads.plans, description.batch, strict=True)
    return {
        "process": reads.process,
        "devices": reads.devices,
        "rows": reads.rows,
        **({"lanes": description.lanes_of(reads)} if description.contents.lanes else {}),
        "local_bytes": reads.local_bytes,
        "read_bytes": reads.read_bytes,
        "leaves": {
            leaf_title(name): {"rows": spans(plan.rows), "columns": column_spans(plan.columns, leaf.shape)}
            for name, plan, leaf in parts
        },
    }


def _devices(description: Description) -> list[dict[str, Any]]:
    """What each device holds."""
    holds: dict[int, dict[str, Any]] = {}
    for name, leaf in zip(description.names, description.batch, strict=True):
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            rows, *columns = [list(part.indices(size)[:2]) for part, size in zip(index, leaf.shape, strict=True)]
            holds.setdefault(device.id, {})[leaf_title(name)] = {"rows": rows, "columns": columns}
    process_of = {device: each.process for each in description.reads for device in each.devices}
    return [
        {"device": device, "process": process_of[device], "leaves": leaves}
        for device, leaves in sorted(holds.items())
    ]


def _epochs(description: Description) -> dict[str, Any]:
    rows, size, multiple = description.contents.rows, description.options.first_batch_size, description.multiple
    return {
        "multiple_of": multiple,
        "next_sizes": next_sizes(size, multiple),
        "epoch": None if rows is None else Epoch.of(rows, size)._asdict(),
        "sizes_that_leave_out_none": None if rows is None else whole_sizes(rows, size, multiple),
    }
