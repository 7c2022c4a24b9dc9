"""Opens a source for its metadata."""

from __future__ import annotations

from typing import Any

import grain

from feedline._src.plan.asked import SourceMetadata
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.sources.open_source import as_source


def opened_metadata(source: Any) -> SourceMetadata:
    """The metadata of a user's source, which is closed if it was opened here.

    Raises:
      ValueError, TypeError, OSError: it is no source, there is no such file, or it has no rows.
      FeedError: only a row tells its spec, and that row cannot be read.
    """
    opened = as_source(source)
    if isinstance(opened, grain.IterDataset | Lanes):
        lanes = Lanes.of(opened)
        return SourceMetadata(FirstItem(lanes).spec, None, lanes.count)
    try:
        return SourceMetadata.of(opened)
    finally:
        if opened is not source:
            opened.close()
