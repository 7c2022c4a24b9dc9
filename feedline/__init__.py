"""feedline delivers global batches to a JAX training loop, already placed on the mesh.

A map of the package. First what a user calls and sees::

    feed        the loop's iterator of global batches: its state and life cycle
    images      JPEG, PNG and other images as rows
    drop_in     prefetch_to_mesh: placement and prefetch for any iterator of batches
    options     Order, Reading, Limits and Blocks, validated on construction
    errors      FeedError and its subclasses
    state       makes the state for a checkpoint, and validates it when it is restored
    statistics  a snapshot of a feed's counts and times
    notebook    the tables that these show in a notebook

then one folder a stage, in the order in which data flows::

    order/      which row stands at which position of an epoch: pure functions
    rows/       what a row is, and the contract of its source
    sources/    what rows are read from
      formats/    one module for each file format
      encoded/    records of bytes, such as image files
      hdf5/       columns and records of HDF5 files
      hugging_face/ datasets of the library `datasets`
      remote/     arrays, Arrow, Zarr and folders of files in stores
    stores/     objects in stores on the network: requests, and their cache on local disk
    loader/     rows → process-local batches
    streams/    the same for rows that only come one after the other
    placement/  process-local batch → global jax.Array on the mesh
    prefetch/   places batches before the step asks for them
    pipeline/   composes the stages
    tuning/     settings that a feed finds while it trains
    observe/    what batches cost, what limits a feed, and which setting to change

and the other folders::

    native/     one C file for order and gather, and its ctypes binding
    runtime/    what Python and JAX require of threads and processes
    agreement/  what processes tell each other
    cluster/    joins the processes of a run, and launches runs
      launchers/  what other launchers tell the processes that they start
    conversion/ rows of any source as files of one format, in shards
    inspection/ the description that `feedline inspect` prints
    audit/      the checks of `feedline audit`
    bench/      the measurements of `feedline bench`
      scale/      those of one process out of thousands
    doctor/     the checks of `feedline doctor`
      inside/     what it observes inside of a training job
    trainer/    `fit` trains a model on the batches of any feed; a bundled MLP
    data/       the data sets of `feedline train`
    cli/        the `feedline` command

Names are resolved on first use (as SPEC 1 does), so ``import feedline`` imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from feedline.version import __version__ as __version__

_MODULE_OF = {
    "Blocks": "options",
    "Feed": "feed",
    "FeedError": "errors",
    "Lanes": "sources.lanes",
    "Limits": "options",
    "Mixture": "sources.mixture",
    "Order": "options",
    "ProcessError": "errors",
    "Ragged": "sources.ragged",
    "Reading": "options",
    "RowError": "errors",
    "RowSource": "rows.row_source",
    "Rows": "rows.row_source",
    "StallError": "errors",
    "Statistics": "statistics",
    "Store": "stores.options",
    "WorkerError": "errors",
    "convert": "conversion.convert",
    "decoded": "sources.decoded",
    "load_lanes": "streams.lane_files",
    "local_rows": "placement.plan",
    "open_source": "sources.open_source",
    "prefetch_to_mesh": "drop_in",
    "save_lanes": "streams.lane_files",
}
_SUBMODULES = ("cluster", "images", "trainer")

__all__ = [*_MODULE_OF, *_SUBMODULES]

if TYPE_CHECKING:
    from feedline import cluster as cluster
    from feedline import images as images
    from feedline import trainer as trainer
    from feedline.conversion.convert import convert as convert
    from feedline.drop_in import prefetch_to_mesh as prefetch_to_mesh
    from feedline.errors import FeedError as FeedError
    from feedline.errors import ProcessError as ProcessError
    from feedline.errors import RowError as RowError
    from feedline.errors import StallError as StallError
    from feedline.errors import WorkerError as WorkerError
    from feedline.feed import Feed as Feed
    from feedline.options import Blocks as Blocks
    from feedline.options import Limits as Limits
    from feedline.options import Order as Order
    from feedline.options import Reading as Reading
    from feedline.placement.plan import local_rows as local_rows
    from feedline.rows.row_source import Rows as Rows
    from feedline.rows.row_source import RowSource as RowSource
    from feedline.sources.decoded import decoded as decoded
    from feedline.sources.lanes import Lanes as Lanes
    from feedline.sources.mixture import Mixture as Mixture
    from feedline.sources.open_source import open_source as open_source
    from feedline.sources.ragged import Ragged as Ragged
    from feedline.statistics import Statistics as Statistics
    from feedline.stores.options import Store as Store
    from feedline.streams.lane_files import load_lanes as load_lanes
    from feedline.streams.lane_files import save_lanes as save_lanes


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"feedline.{_MODULE_OF[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"feedline.{name}")
    else:
        raise AttributeError(f"module 'feedline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
