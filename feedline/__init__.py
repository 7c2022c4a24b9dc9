"""feedline delivers global batches to a JAX training loop, already placed on the mesh.

This module and the modules beside it are public::

    Feed               the training loop's iterator of global batches
    prefetch_to_mesh   placement and prefetch for any iterator of process-local batches
    FeedOptions        the arguments of a feed as one value; feed.options returns it, Feed.from_options takes it
    Plan               what a feed will read and place, and its memory: FeedOptions.plan computes it
    Order, Blocks, Reading, Limits   how rows are ordered and read; validated on construction, like FeedOptions
    building           a context manager: a function of yours changes the options of each feed built in it
    Statistics         a snapshot of a feed's counters

    open_source        opens files by path as a source; RowSource: the protocol of a source of your own
    decoded, Ragged, Packed, Mixture   sources made of other sources; Store: options of a remote store
    Rows               epochs, positions, indices and keys of the rows that a transform gets
    Lanes, save_lanes, load_lanes      a source of several streams; functions that save and load their states
    convert            writes the rows of any source to files of one format
    local_rows         which rows of a global batch this process supplies

    FeedError          and its subclasses: RowError, WorkerError, ProcessError, StallError

    feedline.checkpoint   saves and restores a feed as an item of an Orbax checkpoint
    feedline.cluster   joins the processes of a run
    feedline.images    JPEG, PNG and other images as rows
    feedline.metrics   what feeds count, for Prometheus and for logs
    feedline.trainer   `fit` trains a model on the batches of any iterator

Everything else is in `feedline/_src`, and may change in any version. Names are imported on first use, so
``import feedline`` imports no jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily
from feedline._src.version import __version__ as __version__

if TYPE_CHECKING:
    from feedline import checkpoint as checkpoint
    from feedline import cluster as cluster
    from feedline import images as images
    from feedline import metrics as metrics
    from feedline import trainer as trainer
    from feedline._src.drop_in import prefetch_to_mesh as prefetch_to_mesh
    from feedline._src.errors import FeedError as FeedError
    from feedline._src.errors import ProcessError as ProcessError
    from feedline._src.errors import RowError as RowError
    from feedline._src.errors import StallError as StallError
    from feedline._src.errors import WorkerError as WorkerError
    from feedline._src.feed import Feed as Feed
    from feedline._src.feed_options import FeedOptions as FeedOptions
    from feedline._src.feed_options import building as building
    from feedline._src.files.store import Store as Store
    from feedline._src.listen.statistics import Statistics as Statistics
    from feedline._src.loader.lane_files import load_lanes as load_lanes
    from feedline._src.loader.lane_files import save_lanes as save_lanes
    from feedline._src.options import Blocks as Blocks
    from feedline._src.options import Limits as Limits
    from feedline._src.options import Order as Order
    from feedline._src.options import Reading as Reading
    from feedline._src.plan.plan import Plan as Plan
    from feedline._src.plan.shardings import local_rows as local_rows
    from feedline._src.rows.source import Rows as Rows
    from feedline._src.rows.source import RowSource as RowSource
    from feedline._src.sources.decoded import decoded as decoded
    from feedline._src.sources.lanes import Lanes as Lanes
    from feedline._src.sources.mixture import Mixture as Mixture
    from feedline._src.sources.open_source import open_source as open_source
    from feedline._src.sources.packed import Packed as Packed
    from feedline._src.sources.ragged import Ragged as Ragged
    from feedline._src.tools.convert.convert import convert as convert

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "Blocks": "feedline._src.options",
        "Feed": "feedline._src.feed",
        "FeedOptions": "feedline._src.feed_options",
        "FeedError": "feedline._src.errors",
        "Lanes": "feedline._src.sources.lanes",
        "Limits": "feedline._src.options",
        "Mixture": "feedline._src.sources.mixture",
        "Order": "feedline._src.options",
        "Packed": "feedline._src.sources.packed",
        "Plan": "feedline._src.plan.plan",
        "ProcessError": "feedline._src.errors",
        "Ragged": "feedline._src.sources.ragged",
        "Reading": "feedline._src.options",
        "RowError": "feedline._src.errors",
        "RowSource": "feedline._src.rows.source",
        "Rows": "feedline._src.rows.source",
        "StallError": "feedline._src.errors",
        "Statistics": "feedline._src.listen.statistics",
        "Store": "feedline._src.files.store",
        "WorkerError": "feedline._src.errors",
        "building": "feedline._src.feed_options",
        "convert": "feedline._src.tools.convert.convert",
        "decoded": "feedline._src.sources.decoded",
        "load_lanes": "feedline._src.loader.lane_files",
        "local_rows": "feedline._src.plan.shardings",
        "open_source": "feedline._src.sources.open_source",
        "prefetch_to_mesh": "feedline._src.drop_in",
        "save_lanes": "feedline._src.loader.lane_files",
        "checkpoint": "",
        "cluster": "",
        "images": "",
        "metrics": "",
        "trainer": "",
    },
)
