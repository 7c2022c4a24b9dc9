"""Requests to a store by obstore: which errors pass, and which say that something is wrong for good."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import importlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NamedTuple, TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.store import Url

_log = logging.getLogger("feedline")
T = TypeVar("T")
_SETTLED_S = 60.0
"""A date names a whole second, in which an object may be written twice. One that is older than a minute can be no
date of a later version, even if the clocks of the store and of this machine differ (RFC 7232, 2.2.2)."""
_PROGRESS_BYTES = 1 << 18
"""What must come of an answer within the patience: 64 requests that share a link of 1 MB/s get as much in 17 s."""
_SHORTEST_S = 5.0
"""The least time for that. A shorter patience is about errors."""
RESAMPLED = "its sampled bytes differ"
_CLIENT: dict[str, Any] = {
    "allow_http": True,  # an endpoint of another scheme than https is there only if the user names it
    "connect_timeout": datetime.timedelta(seconds=5),
    "read_timeout": datetime.timedelta(seconds=20),  # between two packets, so that a slow link is no error
    "timeout": datetime.timedelta(minutes=30),
    "pool_idle_timeout": datetime.timedelta(seconds=60),
}
_MEANS_LATER = (408, 425, 429)
_STATUS = re.compile(r"\b([45]\d\d) ([A-Z][a-z]+(?: [A-Z][a-z]+)*)")
_CAUSES = {
    "dns error": "the name of the host does not resolve",
    "connection refused": "connection refused",
    "connection reset": "connection reset",
    "invalidcontenttype": "the server does not speak TLS, as https:// needs it",
    "unreachable": "there is no route to the host",
    "no route to host": "there is no route to the host",
    "timedout": "timed out",
    "timed out": "timed out",
    "incompletemessage": "the connection was cut",
    "body error": "the connection was cut",
    "sending request": "sending the request failed",
}
"""What obstore says of the network in lower case, and what it means: the causes before what they cause."""


class Version(NamedTuple):
    """What changes when an object is replaced.

    Attributes:
      size_bytes: of the object.
      tag: its ETag, or the time of its last modification if the store gives no ETag.
      nonce: "" of a strong version, which is another one for each replaced object. Else a random number, so that
        nobody else finds what was cached of the object.
      sampled: a digest of sampled bytes; "" if none were fetched, as of a strong version.
    """

    size_bytes: int
    tag: str
    nonce: str = ""
    sampled: str = ""

    @property
    def is_strong(self) -> bool:
        """Whether an object with the same size and tag has the same bytes."""
        return not self.nonce

    @property
    def cache_tag(self) -> str:
        """What names of the cache contain."""
        return f"{self.tag} {self.nonce}" if self.nonce else self.tag

    def check(self, now: Version, name: str) -> None:
        """Refuse an object whose version is `now` another one. FeedError says what differs."""
        if now.size_bytes != self.size_bytes:
            raise replaced(name, f"it has {now.size_bytes} bytes and had {self.size_bytes}")
        if now.tag != self.tag:
            raise replaced(name, f"its ETag is {now.tag} and was {self.tag}")
        if self.sampled and now.sampled and now.sampled != self.sampled:
            raise replaced(name, RESAMPLED)


class Listed(NamedTuple):
    """An object that a store lists."""

    url: Url
    version: Version


class TransientError(Exception):
    """A request failed, and may succeed if it is repeated. The message holds no address and no credentials."""


class UnreachableError(TransientError):
    """No connection can be made to a store that this process has not reached yet: its address may be wrong."""


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
                f"obstore reads {base} and is not installed; from the clone: pip install '.[stores]'"
            ) from error
        self._base = base
        self._told_of_weak = False
        self._reached = False
        self._answered = False  # then a later trouble of what gives credentials passes
        try:
            # retries are ours: they are counted, and stop when the interpreter ends
            self._store = from_url(base, client_options=_CLIENT, retry_config={"max_retries": 0})
        except Exception as error:  # noqa: BLE001  of many types, from the library
            raise self._for_good("must be described by the environment of this process", error) from None

    def __repr__(self) -> str:
        return f"Client({self._base!r})"

    async def version(self, key: str, patience_s: float) -> Version:
        """The present version of an object.

        Raises:
          FileNotFoundError: there is none.
          TransientError: try again. It failed, or made no progress for `patience_s`.
          FeedError: it cannot be read.
        """
        found = await self._asked(
            key, self._obstore.get_async(self._store, key, options={"head": True}), patience_s
        )
        kind = str(found.attributes.get("Content-Type", ""))
        if kind.startswith("text/html"):
            raise self._refused(
                "must answer with data, and {} is a page (text/html), such as one to sign in; open the address in "
                "a browser, and check it",
                key,
            )
        return self._version(found.meta)

    async def get(self, key: str, start: int, stop: int, version: Version, patience_s: float) -> Any:
        """Bytes `start` to `stop` of an object, as a buffer.

        Raises:
          FileNotFoundError: there is no such object any more.
          TransientError: try again. It failed, or made no progress for `patience_s`.
          FeedError: it has another version, or cannot be read.
        """
        request = self._obstore.get_async(self._store, key, options={"range": (start, stop)})
        try:
            found = await self._asked(key, request, patience_s)
        except _RangeError:
            version.check(await self.version(key, patience_s), f"{self._base}/{key}")
            raise
        version.check(self._version(found.meta), f"{self._base}/{key}")
        stream = found.stream(min_chunk_size=_PROGRESS_BYTES)
        data = b"".join([part async for part in self._each(key, stream, patience_s)])
        if len(data) != stop - start:
            raise TransientError(f"{len(data)} bytes came of {stop - start}")
        return data

    async def check_bucket(self, patience_s: float) -> None:
        """Refuse a bucket that does not exist, with a FileNotFoundError. A web server has none."""
        if Url(self._base, "").can_list:
            with contextlib.suppress(StopAsyncIteration, TransientError, FeedError):  # others may list no bucket
                await self._asked("", anext(self._obstore.list(self._store)), patience_s)

    async def listed(self, prefix: str, patience_s: float) -> list[Listed]:
        """All objects whose keys begin with `prefix`, in sorted order. Errors as of `version`."""
        folder = prefix.rpartition("/")[0]
        found: list[Listed] = []
        stream = self._obstore.list(self._store, folder or None, chunk_size=1000)
        async for chunk in self._each(prefix, stream, patience_s):
            found += [Listed(Url(self._base, meta["path"]), self._version(meta)) for meta in chunk]
        return sorted(each for each in found if each.url.key.startswith(prefix))

    async def folders(self, prefix: str, patience_s: float) -> list[str]:
        """The names of the folders in a folder. Errors as of `version`."""
        request = self._obstore.list_with_delimiter_async(self._store, prefix or None)
        found = await self._asked(prefix, request, patience_s)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    async def _each(self, key: str, stream: AsyncIterator[T], patience_s: float) -> AsyncIterator[T]:
        """The parts of a stream, each of which must come within the patience."""
        while True:
            try:
                part = await self._asked(key, anext(stream), patience_s)
            except StopAsyncIteration:
                return
            yield part

    async def _asked(self, key: str, request: Awaitable[T], patience_s: float) -> T:
        limit_s = max(patience_s, _SHORTEST_S)
        try:
            async with asyncio.timeout(limit_s):
                found = await request
            self._answered = self._reached = True
            return found
        except TimeoutError:
            raise TransientError(f"no progress in {limit_s:g} s") from None
        except StopAsyncIteration:
            raise
        except Exception as error:  # noqa: BLE001  of many types, from the library
            kind, text = type(error).__name__, str(error)
            unreachable = "ConnectError(" in text or "kind: Connect" in text
            self._reached |= not unreachable
            status = _STATUS.search(text)
            if "NoSuchBucket" in text or (kind == "GenericError" and status and status[1] == "404"):
                raise FileNotFoundError(
                    f"there is no bucket {self._base}; check its name, and that of the server (AWS_ENDPOINT_URL)"
                ) from None
            if isinstance(error, FileNotFoundError) and status and status[1] == "405":  # obstore takes it for 404
                raise self._refused(
                    "must answer HEAD requests, which ask for size and version, and {} answered with 405 Method "
                    "Not Allowed; let the server allow them, or serve it by another one",
                    key,
                ) from None
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
            if kind == "NotSupportedError":
                raise self._refused(
                    "must answer requests for ranges of bytes, and {} answered with something else, such as a "
                    "page to sign in; open the address in a browser, or serve it by a server that knows ranges",
                    key,
                ) from None
            if "builder error" in text:
                raise self._for_good("must have an address", error, key) from None
            if status and status[1] == "416":
                raise _RangeError(_reason(error)) from None
            if status and status[1].startswith("4") and int(status[1]) not in _MEANS_LATER:
                raise self._for_good("must answer requests", error, key) from None
            kind_of_error = UnreachableError if unreachable and not self._reached else TransientError
            raise kind_of_error(_reason(error)) from None

    def _version(self, meta: Any) -> Version:
        """The version that a listing or an answer names. Some stores leave quotes out of one of them."""
        given, date, size = meta["e_tag"] or "", meta["last_modified"].replace(microsecond=0), int(meta["size"])
        tag = given.removeprefix("W/").strip('"')
        settled = 0 < date.timestamp() < time.time() - _SETTLED_S  # obstore: 1970 if the store gives none
        is_date = tag == f"{int(date.timestamp()):x}-{size:x}"  # nginx
        if not given.startswith("W/") and (settled or (tag and not is_date)):
            return Version(size, tag or str(date))
        if not self._told_of_weak:
            self._told_of_weak = True
            _log.warning(
                "%s gives no strong ETag and no date of an earlier minute, so a replaced object is recognized by "
                "samples of its bytes, which are compared after each request, and nothing is cached for later "
                "sources (docs/stores.md)",
                self._base,
            )
        return Version(size, tag or str(date), secrets.token_hex(8))

    def _for_good(self, rule: str, error: Exception, key: str = "") -> FeedError:
        return self._refused(
            f"{rule}, and {{}} failed with {_reason(error)}; check the address and the credentials, which are "
            "taken from the environment as obstore documents it (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, "
            "AWS_SKIP_SIGNATURE, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME …)",
            key,
        )

    def _refused(self, found: str, key: str) -> FeedError:
        name = f"{self._base}/{key}"
        return FeedError(f"a store {found.format(name)}", stage="read", file=name)


@functools.cache
def client_of(base: str) -> Client:
    """The client of a bucket or host."""
    return Client(base)


def _reason(error: Exception) -> str:
    """What happened, in words that hold no address and no credentials: the library's text may hold both."""
    text = str(error)
    if status := _STATUS.search(text):
        return f"{status[1]} {status[2]}"
    causes = (meaning for cause, meaning in _CAUSES.items() if cause in text.lower())
    return next(causes, type(error).__name__)


def replaced(name: str, found: str) -> FeedError:
    """The error for an object that was replaced while it was in use; `found` says what differs."""
    return FeedError(
        f"an object must not change while a feed reads it, and {found} since the source was opened. Write new "
        "data to a new key, and build a new feed",
        stage="read",
        file=name,
    )
