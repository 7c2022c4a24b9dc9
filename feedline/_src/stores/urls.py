"""The addresses of objects in stores: `s3://bucket/key`, `gs://bucket/key`, `https://host/path`."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import urlsplit

_WEB = ("http", "https")
SCHEMES = ("s3", "gs", *_WEB)
_MAGIC = re.compile(r"[*?\[]")


class Url(NamedTuple):
    """A validated address. It holds no credentials.

    Attributes:
      base: the bucket or the host, with its scheme.
      key: of the object, or a glob or a prefix of keys; without a leading slash.

    Example:
      >>> Url.parse("s3://corpus/train/x.npy")
      Url(base='s3://corpus', key='train/x.npy')
    """

    base: str
    key: str

    @classmethod
    def parse(cls, url: str) -> Url:
        """The parts of `url`.

        Raises:
          ValueError: it is not the address of an object, or has credentials or a query.
        """
        scheme, _, rest = url.partition("://")
        if scheme in _WEB:
            split = urlsplit(url)
            if "@" in split.netloc or "?" in rest or "#" in rest:
                shown = f"{scheme}://{split.netloc.rpartition('@')[2]}{split.path}"
                raise ValueError(
                    "an address must have no user, password, query or fragment, because it is saved and shown, "
                    f"and the one of {shown} has; leave them out, and give credentials by a store that takes them "
                    "from the environment (s3://, gs://)"
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
        """The address of an object below this prefix."""
        return Url(self.base, f"{self.key}/{key}" if self.key else key)

    @property
    def is_glob(self) -> bool:
        """Whether the key is a pattern."""
        return _MAGIC.search(self.key) is not None

    @property
    def can_list(self) -> bool:
        """Whether the store lists keys."""
        return not self.base.startswith("http")

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"


def is_url(path: object) -> bool:
    """Whether a path is the address of an object in a store.

    Example:
      >>> is_url("gs://bucket/x.npy"), is_url("data/x.npy")
      (True, False)
    """
    return (
        isinstance(path, str | bytes)
        and os.fsdecode(path).partition("://")[0] in SCHEMES
        and b"://" in (path if isinstance(path, bytes) else path.encode())
    )
