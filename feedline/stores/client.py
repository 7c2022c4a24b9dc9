"""Requests to a store by obstore: which errors pass, and which say that something is wrong for good."""

from __future__ import annotations

import datetime
import functools
import importlib
import re
from collections.abc import Awaitable
from typing import Any, NamedTuple, TypeVar

from feedline.errors import FeedError
from feedline.stores.urls import Url

T = TypeVar("T")
_CLIENT: dict[str, Any] = {
    "allow_http": True,  # an endpoint of another scheme than https is there only if the user names it
    "connect_timeout": datetime.timedelta(seconds=5),
    "read_timeout": datetime.timedelta(seconds=20),  # between two packets, so that a slow link is no error
    "timeout": datetime.timedelta(minutes=30),
    "pool_idle_timeout": datetime.timedelta(seconds=60),
}
_MEANS_LATER = (408, 425, 429)
_STATUS = re.compile(r"\b([45]\d\d) ([A-Z][a-z]+(?: [A-Z][a-z]+)*)")
_NETWORK = re.compile(
    r"connection refused|connection reset|timed ?out|dns error|incompletemessage|body error|sending request", re.I
)


class Version(NamedTuple):
    """What changes when an object is replaced.

    Attributes:
      size_bytes: of the object.
      tag: its ETag, or the time of its last modification if the store gives no ETag.
    """

    size_bytes: int
    tag: str

    def check(self, now: Version, name: str) -> None:
        """Refuse an object whose version is `now` another one. FeedError says what differs."""
        if now != self:
            raise changed(name, self, now)


class Listed(NamedTuple):
    """An object that a store lists."""

    url: Url
    version: Version


class TransientError(Exception):
    """A request failed, and may succeed if it is repeated. The message holds no address and no credentials."""


class _RangeError(TransientError):
    """The object has no such bytes."""


class Client:
    """Requests to one bucket or host. Credentials are those that obstore finds: environment, files, instance.

    Args:
      base: as of a `Url`.

    Raises:
      ImportError: obstore is not installed.
      FeedError: no credentials, or settings in the environment that obstore does not take.
    """

    def __init__(self, base: str) -> None:
        try:
            self._obstore = importlib.import_module("obstore")
            from_url = importlib.import_module("obstore.store").from_url
        except ModuleNotFoundError as error:
            raise ImportError(
                f"obstore reads {base} and is not installed; pip install 'feedline[stores]'"
            ) from error
        self._base = base
        self._answered = False  # then a later trouble of what gives credentials passes
        try:
            # retries are ours: they are counted, and stop when the interpreter ends
            self._store = from_url(base, client_options=_CLIENT, retry_config={"max_retries": 0})
        except Exception as error:  # noqa: BLE001  of many types, from the library
            raise self._for_good("must be described by the environment of this process", error) from None

    def __repr__(self) -> str:
        return f"Client({self._base!r})"

    async def version(self, key: str) -> Version:
        """The present version of an object.

        Raises:
          FileNotFoundError: there is none.
          TransientError: try again.
          FeedError: it cannot be read.
        """
        found = await self._asked(key, self._obstore.get_async(self._store, key, options={"head": True}))
        kind = str(found.attributes.get("Content-Type", ""))
        if kind.startswith("text/html"):
            raise self._page(key)
        return _version(found.meta)

    async def get(self, key: str, start: int, stop: int, version: Version) -> Any:
        """Bytes `start` to `stop` of an object, as a buffer.

        Raises:
          FileNotFoundError: there is no such object any more.
          TransientError: try again.
          FeedError: it has another version, or cannot be read.
        """
        request = self._obstore.get_async(self._store, key, options={"range": (start, stop)})
        try:
            found = await self._asked(key, request)
        except _RangeError:
            version.check(await self.version(key), f"{self._base}/{key}")
            raise
        version.check(_version(found.meta), f"{self._base}/{key}")
        data = await self._asked(key, found.buffer_async())
        if len(data) != stop - start:
            raise TransientError(f"{len(data)} bytes came of {stop - start}")
        return data

    async def list(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin with `prefix`, in sorted order. Errors as of `version`."""
        folder = prefix.rpartition("/")[0]
        found: list[Listed] = []
        stream = self._obstore.list(self._store, folder or None, chunk_size=1000)
        while True:
            try:
                chunk = await self._asked(prefix, anext(stream))
            except StopAsyncIteration:
                break
            found += [Listed(Url(self._base, meta["path"]), _version(meta)) for meta in chunk]
        return sorted(each for each in found if each.url.key.startswith(prefix))

    async def folders(self, prefix: str) -> tuple[str, ...]:
        """The names of the folders in a folder. Errors as of `version`."""
        request = self._obstore.list_with_delimiter_async(self._store, prefix or None)
        found = await self._asked(prefix, request)
        return tuple(sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]))

    async def _asked(self, key: str, request: Awaitable[T]) -> T:
        try:
            found = await request
            self._answered = True
            return found
        except StopAsyncIteration:
            raise
        except Exception as error:  # noqa: BLE001  of many types, from the library
            kind, text = type(error).__name__, str(error)
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"there is no object {self._base}/{key}; check the address") from None
            said = text.replace(f"/{key}", "").replace(f"/{self._base.rpartition('/')[2]}", "").lower()
            no_credentials = "credential" in said and not self._answered
            if no_credentials or kind in ("PermissionDeniedError", "UnauthenticatedError"):
                raise self._for_good("must let this process read it", error, key) from None
            if "redirect" in said:
                raise self._for_good("must be asked in its own region (AWS_REGION)", error, key) from None
            if "certificate" in said:
                raise self._for_good("must have a certificate that this machine trusts", error, key) from None
            status = _STATUS.search(text)
            if kind == "NotSupportedError":
                raise self._no_range(key) from None
            if "builder error" in text:
                raise self._for_good("must have an address", error, key) from None
            if status and status[1] == "416":
                raise _RangeError(_reason(error)) from None
            if status and status[1].startswith("4") and int(status[1]) not in _MEANS_LATER:
                raise self._for_good("must answer requests", error, key) from None
            raise TransientError(_reason(error)) from None

    def _for_good(self, rule: str, error: Exception, key: str = "") -> FeedError:
        name = f"{self._base}/{key}"
        return FeedError(
            f"a store {rule}, and {name} failed with {_reason(error)}; check the address and the credentials, "
            "which are taken from the environment as obstore documents it (AWS_ACCESS_KEY_ID, AWS_REGION, "
            "AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE, GOOGLE_APPLICATION_CREDENTIALS …)",
            stage="read",
            file=name,
        )

    def _no_range(self, key: str) -> FeedError:
        return FeedError(
            f"a store must answer requests for ranges of bytes, and {self._base}/{key} answered with something "
            f"else, "
            "such as a page to sign in; open the address in a browser, or serve it by a server that knows ranges",
            stage="read",
            file=f"{self._base}/{key}",
        )

    def _page(self, key: str) -> FeedError:
        return FeedError(
            f"a store must answer with data, and {self._base}/{key} is a page (text/html), such as one to sign "
            f"in; "
            "open the address in a browser, and check it",
            stage="read",
            file=f"{self._base}/{key}",
        )


@functools.cache
def client_of(base: str) -> Client:
    """The client of a bucket or host."""
    return Client(base)


def _version(meta: Any) -> Version:
    """The version that a listing or an answer names. Some stores leave quotes out of one of them."""
    tag = meta["e_tag"] or meta["last_modified"].replace(microsecond=0)
    return Version(int(meta["size"]), str(tag).removeprefix("W/").strip('"'))


def _reason(error: Exception) -> str:
    """What happened, in words that hold no address and no credentials: the library's text may hold both."""
    text = str(error)
    if status := _STATUS.search(text):
        return f"{status[1]} {status[2]}"
    if network := _NETWORK.search(text):
        return network[0].lower()
    return type(error).__name__


def changed(name: str, before: Version, now: Version) -> FeedError:
    """The error for an object that was replaced while it was in use."""
    found = (
        f"it has {now.size_bytes} bytes and had {before.size_bytes}"
        if now.size_bytes != before.size_bytes
        else f"its ETag is {now.tag} and was {before.tag}"
    )
    return FeedError(
        f"an object must not change while a feed reads it, and {found} since the source was opened. Write new "
        "data to a new key, and build a new feed",
        stage="read",
        file=name,
    )
