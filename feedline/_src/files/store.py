"""`Store` says how objects in a store are read. `Url` is an address of objects, such as `s3://bucket/key`."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from feedline._src.options import checked_integer

_WEB = ("http", "https")
SCHEMES = ("s3", "gs", "az", *_WEB)
_MAGIC = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Store:
    """How objects in a remote store are read. It holds no credentials: they come from the environment.

    Attributes:
      cache: the folder of the cache on local disk; None: `$FEEDLINE_CACHE`, or ~/.cache/feedline. Several
        processes and jobs may share it.
      cache_bytes: the size limit of the cache; None: half of the sum of the free space and the cache's present
        size. The least recently used files of the cache are evicted first.
      patience_s: how long failed requests are repeated before an error is raised. A request also fails if, within
        this time (at least 5 s), it neither receives 256 KiB more nor ends. If a store was never reached, an error
        is raised after 10 s. A feed itself stops waiting after `Reading(stall_error_s=300)`; to wait for longer,
        raise both.

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
        patience_s: object = self.patience_s
        if isinstance(patience_s, bool) or not isinstance(patience_s, numbers.Real):
            raise TypeError(f"patience_s must be a number of seconds, got {patience_s!r}")
        if not self.patience_s >= 0:
            raise ValueError(f"patience_s must be 0 or more seconds, got {self.patience_s!r}")

    @property
    def folder(self) -> str:
        """The absolute path of the cache's folder."""
        given = os.fspath(self.cache) if self.cache is not None else os.environ.get("FEEDLINE_CACHE")
        return os.path.abspath(given or os.path.expanduser("~/.cache/feedline"))


class Url(NamedTuple):
    """A validated address. It holds no credentials.

    Attributes:
      base: the bucket or the host, with its scheme.
      key: the key of an object, or a glob or a prefix of keys; without a leading slash.
    """

    base: str
    key: str

    @classmethod
    def parse(cls, url: str) -> Url:
        """Split an address. ValueError: it cannot be the address of an object, or has credentials or a query."""
        scheme, _, rest = url.partition("://")
        if scheme in _WEB:
            split = urlsplit(url)
            if "@" in split.netloc or "?" in rest or "#" in rest:
                shown = f"{scheme}://{split.netloc.rpartition('@')[2]}{split.path}"
                raise ValueError(
                    "an address must have no user, password, query or fragment, because it is saved and shown, "
                    f"and {shown} was given with one; leave it out. If the objects need credentials, use a store "
                    "that takes them from the environment (s3://, gs://)"
                )
        host, _, key = rest.partition("/")
        parts = [host, *key.removesuffix("/").split("/")] if key else [host]
        if not host or any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"names of buckets and keys must not have empty parts, '.' or '..', got {url}; write the key as "
                "the store lists it"
            )
        return cls(f"{scheme}://{host}", key)

    def below(self, key: str) -> Url:
        return Url(self.base, f"{self.key}/{key}" if self.key else key)

    @property
    def is_glob(self) -> bool:
        return _MAGIC.search(self.key) is not None

    @property
    def can_list(self) -> bool:
        return not self.base.startswith("http")

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"


def is_url(path: object) -> bool:
    """Whether `path` is the address of an object in a store."""
    return isinstance(path, str | bytes) and os.fsdecode(path).startswith(tuple(f"{each}://" for each in SCHEMES))
