"""Finding and opening the objects of a source, all at once: each alone would cost the latency of the store."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from feedline._src.stores.client import Listed, Version, client_of
from feedline._src.stores.fetcher import fetcher
from feedline._src.stores.options import Store
from feedline._src.stores.origin import Origin, gathered
from feedline._src.stores.remote_object import RemoteObject
from feedline._src.stores.residency import BLOCK_BYTES, Residency
from feedline._src.stores.urls import Url

T = TypeVar("T")
_FOLDER_SUFFIX = ".zarr"


def matches(url: str, options: Store) -> list[Listed] | None:
    """The objects, or Zarr folders, that a glob matches, in sorted order; None of an address that is no glob.

    Raises:
      FileNotFoundError: no match.
      ValueError: no address, or a glob where the store does not list its keys.
      FeedError: the store cannot be read.
    """
    parsed = Url.parse(url)
    if not parsed.is_glob:
        return None
    if not parsed.can_list:
        raise ValueError(
            f"a web server does not list its files, so http:// and https:// take no globs, got {url}; write a "
            "glob over s3:// or gs://, or name each file"
        )
    try:
        pattern = re.compile(_expression(parsed.key))
    except re.error as error:
        raise ValueError(f"{url} is no glob ({error}); write a character that stands for itself as [?]") from error
    above = Url(parsed.base, parsed.key.rpartition("/")[0])
    if parsed.key.endswith(_FOLDER_SUFFIX) and not above.is_glob:
        within = [Url(parsed.base, f"{above.key}/{name}".lstrip("/")) for name in folders(above, options)]
        found = [Listed(url, Version(0, "")) for url in sorted(within) if pattern.fullmatch(url.key)]
        if found:
            return found
    listed = listing(Url(parsed.base, re.split(r"[*?\[]", parsed.key, maxsplit=1)[0]), options)
    found = [each for each in listed if pattern.fullmatch(each.url.key)]
    if not found:
        raise FileNotFoundError(f"no object matches {url}; check the bucket and the pattern")
    return found


def folders(prefix: Url, options: Store) -> tuple[str, ...]:
    """The names of the folders in a folder of a bucket. Errors as of `listing`."""
    client = client_of(prefix.base)
    return _listed(prefix, options, lambda: client.folders(prefix.key, options.patience_s))


def listing(prefix: Url, options: Store) -> list[Listed]:
    """All objects of a bucket whose keys begin with that of `prefix`, in sorted order.

    Raises:
      FeedError: the store cannot be read.
    """
    client = client_of(prefix.base)
    return _listed(prefix, options, lambda: client.list(prefix.key, options.patience_s))


def _listed(prefix: Url, options: Store, request: Callable[[], Awaitable[T]]) -> T:
    return fetcher().run(fetcher().patiently(str(prefix), options.patience_s, None, request)).result()


def _expression(pattern: str) -> str:
    """A glob as a regular expression: "*" and "?" match no slash, "**/" any folders."""
    parts = []
    for token in re.findall(r"\*\*/|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if token == "**/":
            parts.append("(?:.*/)?")
        elif token in ("*", "?"):
            parts.append("[^/]" + token.replace("?", ""))
        elif len(token) > 2 and token[0] == "[":
            parts.append(token.replace("[!", "[^", 1).replace("\\", r"\\"))
        else:
            parts.append(re.escape(token))
    return "".join(parts)


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
