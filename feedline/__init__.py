"""feedline hands a JAX training loop global batches that already lie on the mesh.

A map of the package, in the order the data flows::

    order       which row stands at which position of a run          pure
    loader/     rows → process-local host batches (Grain reads)
    placement/  host batch → global jax.Array on the mesh
    prefetch/   placed batches ahead of training, and their bounded hand-over
    feed        composes the four; state and life cycle
    state       what a checkpoint holds, and the checks when it comes back
    lane_files  a checkpoint of a stream with several lanes
    observe/    statistics
    cluster/    many processes: initialize, agree, abort, launch
    trainer/    a bundled MLP trainer, given any iterator of batches
    cli/        the `feedline` command

Names are resolved on first use (as SPEC 1 does), so ``import feedline`` imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from feedline.version import __version__ as __version__

_WHERE = {
    "Blocks": "options",
    "Feed": "feed",
    "FeedError": "errors",
    "Lanes": "loader.lanes",
    "Order": "options",
    "ProcessError": "errors",
    "Reading": "options",
    "RowError": "errors",
    "RowSource": "loader.sources",
    "Rows": "loader.form",
    "StallError": "errors",
    "Statistics": "observe.statistics",
    "WorkerError": "errors",
    "load_lanes": "lane_files",
    "local_rows": "placement.plan",
    "open_source": "loader.sources",
    "prefetch_to_mesh": "drop_in",
    "save_lanes": "lane_files",
}
_MODULES = ("cluster",)

__all__ = [*_WHERE, *_MODULES]

if TYPE_CHECKING:
    from feedline import cluster as cluster
    from feedline.drop_in import prefetch_to_mesh as prefetch_to_mesh
    from feedline.errors import FeedError as FeedError
    from feedline.errors import ProcessError as ProcessError
    from feedline.errors import RowError as RowError
    from feedline.errors import StallError as StallError
    from feedline.errors import WorkerError as WorkerError
    from feedline.feed import Feed as Feed
    from feedline.lane_files import load_lanes as load_lanes
    from feedline.lane_files import save_lanes as save_lanes
    from feedline.loader.form import Rows as Rows
    from feedline.loader.lanes import Lanes as Lanes
    from feedline.loader.sources import RowSource as RowSource
    from feedline.loader.sources import open_source as open_source
    from feedline.observe.statistics import Statistics as Statistics
    from feedline.options import Blocks as Blocks
    from feedline.options import Order as Order
    from feedline.options import Reading as Reading
    from feedline.placement.plan import local_rows as local_rows


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"feedline.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"feedline.{name}")
    else:
        raise AttributeError(f"module 'feedline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
