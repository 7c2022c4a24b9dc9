"""The reasons why a feed refuses a batch size or a remainder, each with a change that works."""

from __future__ import annotations

from typing import Any

import jax

from feedline._src.feed_options import FeedOptions
from feedline._src.tools.inspect.contents import Contents
from feedline._src.tools.inspect.sizes import next_sizes
from feedline._src.tools.inspect.words import plural

VALID = "valid"
"""The key of the boolean leaf that remainder "pad" and bad_rows "mask" add."""


def problems_of(contents: Contents, options: FeedOptions, multiple: int, shards: int) -> list[str]:
    """Why a feed refuses the batch size, each with a change that works.

    Args:
      contents: what the source holds.
      options: what a feed is asked for.
      multiple: what every batch size is a multiple of.
      shards: of the batch axis.
    """
    size, rows, found = options.first_batch_size, contents.rows, []
    if size % multiple:
        parts = f"{shards} shards of the batch axis"
        rule = parts if multiple == shards else f"{parts} and of the {contents.lanes} lanes, so of {multiple}"
        sizes = " or ".join(f"{n:,}" for n in next_sizes(size, multiple))
        found.append(f"The batch size must be a multiple of the {rule}, got {size:,}; {sizes} would work.")
    # an endless feed wraps as often as it must
    available = None if rows is None else rows if options.remainder == "drop" else rows * (options.epochs or size)
    if available is not None and options.remainder != "pad" and available < size:
        fitting = available // multiple * multiple
        smaller = f"a batch size of at most {fitting:,}" if fitting else "fewer shards of the batch axis"
        found.append(
            f'Remainder "{options.remainder}" drops a batch that is not full, and {plural(available, "row")} '
            f'cannot fill one of {size:,}; use {smaller}, or remainder "pad".'
        )
    return found


def why_no_mask(batch: Any) -> str:
    """Why a batch cannot have the leaf `valid`; empty if it can."""
    if type(batch) is dict and VALID not in batch and all(isinstance(key, str) for key in batch):
        return ""
    found = f"it has the keys {list(batch)}" if isinstance(batch, dict) else f"it is a {type(batch).__name__}"
    if isinstance(batch, jax.ShapeDtypeStruct):
        found = "it is one array without a name"
    return (
        f'Remainder "pad" and bad_rows "mask" add a leaf {VALID!r}, so the batch must be a dict of strings '
        f'without that key, but {found}; name the arrays, as in {{"x": "x.npy"}}.'
    )
