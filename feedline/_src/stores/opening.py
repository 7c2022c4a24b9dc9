"""Finding and opening the objects of a source, all at once: each alone would cost the latency of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feedline._src.files.client import Version
from feedline._src.files.fetcher import fetcher
from feedline._src.files.origin import Origin, gathered
from feedline._src.files.store import Store, Url
from feedline._src.stores.remote_object import RemoteObject
from feedline._src.stores.residency import BLOCK_BYTES, Residency


class RemoteObjects:
    """The objects of a source, open.

    Attributes:
      residency: their cache, and which of their blocks are there.
      by_url: the objects.

    Args:
      urls: their addresses.
      options: cache and patience.

    Raises:
      FileNotFoundError: there is no such object.
      FeedError: the store cannot be read.
    """

    def __init__(self, urls: Sequence[str], options: Store) -> None:
        self.residency = Residency(options)
        parsed = {Url.parse(url): Origin(options.patience_s) for url in dict.fromkeys(urls)}
        asked = gathered(origin.sampled_version(url) for url, origin in parsed.items())
        found = fetcher().run(asked).result()
        self.residency.reserve(sum(-(-version.size_bytes // BLOCK_BYTES) for version in found))
        self.by_url = {
            str(url): RemoteObject(url, version, origin, self.residency)
            for (url, origin), version in zip(parsed.items(), found, strict=True)
        }

    @property
    def versions(self) -> dict[str, Version]:
        """The version of each object."""
        return {url: item.version for url, item in self.by_url.items()}

    def samples(self, ranges: Sequence[tuple[str, int, int]]) -> dict[tuple[str, int, int], bytes]:
        """The bytes of some (address, offset, length), all fetched at once."""
        asked: dict[str, list[tuple[int, int]]] = {}
        for url, offset, length in dict.fromkeys(ranges):
            asked.setdefault(url, []).append((offset, length))
        started: list[Any] = [
            ((url, *part), future)
            for url, parts in asked.items()
            for part, future in zip(parts, self.by_url[url].start_samples(parts), strict=True)
        ]
        return {key: self.by_url[key[0]].result(future) for key, future in started}

    def close(self) -> None:
        """Give up what is being fetched."""
        for item in self.by_url.values():
            item.cancel()
