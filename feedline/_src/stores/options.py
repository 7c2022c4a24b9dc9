"""`Store`: the cache of a store far away, and how long to wait for it."""

from __future__ import annotations

import dataclasses
import os

from feedline._src.options import checked_integer


@dataclasses.dataclass(frozen=True)
class Store:
    """How objects in a store far away are read. No credentials: the environment gives these.

    Args:
      cache: the folder of the cache on local disk; None: `$FEEDLINE_CACHE`, or ~/.cache/feedline. Several
        processes and jobs may share it.
      cache_bytes: the size limit of that folder; None: half of the space that is free or that the cache has
        already. The blocks that were not used for the longest time are deleted first.
      patience_s: how long a store may fail before that is an error. Until then, requests are repeated. It is also
        the longest time in which a request may make no progress of 256 KiB, or to its end; at least 5 s. A store
        that was never reached is an error after 10 s. A feed itself stops waiting after
        `Reading(stall_error_s=300)`, so more than that needs both.

    Example:
      >>> Store(cache="/local/cache", cache_bytes=200 << 30).patience_s
      240.0
    """

    cache: str | None = None
    cache_bytes: int | None = None
    patience_s: float = 240.0

    def __post_init__(self) -> None:
        if self.cache is not None and not isinstance(self.cache, str | os.PathLike):
            raise TypeError(f"cache must be the path of a folder, got {type(self.cache).__name__}")
        if self.cache_bytes is not None:
            checked_integer("cache_bytes", self.cache_bytes, at_least=1)
        if not self.patience_s >= 0:
            raise ValueError(f"patience_s must be 0 or more seconds, got {self.patience_s!r}")

    @property
    def folder(self) -> str:
        """The folder of the cache."""
        given = os.fspath(self.cache) if self.cache is not None else os.environ.get("FEEDLINE_CACHE")
        return os.path.abspath(given or os.path.expanduser("~/.cache/feedline"))
