"""Requests to a store through obstore. Transient errors are retried; other errors are raised."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import importlib
import logging
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import fetcher
from feedline._src.files.file import Version
from feedline._src.files.hedging import Hedging
from feedline._src.files.store import Url

_log = logging.getLogger("feedline")
T = TypeVar("T")
_SETTLED_S = 60.0
"""A date is precise to one second, and an object may be written twice in a second. But once its date is a minute
old, no later version can have this date, even if the clocks of store and machine differ (RFC 7232, 2.2.2)."""
_PROGRESS_BYTES = 1 << 18
"""An answer must grow by this much within the patience. Even if 64 requests share 1 MB/s, this takes only 17 s."""
_SHORTEST_S = 5.0
"""The least time for this progress, even if the patience is shorter: that limits only how long errors may last."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_UNREACHABLE_S = 10.0  # the most patience with a store that was never reached, since its address may be wrong
_WARN_AFTER_S, _WARN_EVERY_S = 5.0, 60.0
_WAIT = (
    "check the network and the store, or wait longer with feedline.Store(patience_s=...). The feed can be built "
    "again from its last state"
)
_FIND = "check the address, the network, and the server that the environment names (AWS_ENDPOINT_URL)"
_CLIENT: dict[str, Any] = {
    "allow_http": True,  # used only if the user names an http endpoint
    "connect_timeout": datetime.timedelta(seconds=5),
    "read_timeout": datetime.timedelta(seconds=20),  # from packet to packet, so that a slow link is no error
    "timeout": datetime.timedelta(minutes=30),
    "pool_idle_timeout": datetime.timedelta(seconds=60),
}
_TRANSIENT = (408, 416, 425, 429)
"""4xx statuses of requests that may succeed later; 416 (no such range) only if the object was not replaced."""
_STATUS = re.compile(r"\b([45]\d\d) ([A-Z][a-z]+(?: [A-Z][a-z]+)*)")
_CAUSES = {
    "dns error": "the name of the host does not resolve",
    "connection refused": "connection refused",
    "connection reset": "connection reset",
    "invalidcontenttype": "the server does not speak TLS, which https:// requires",
    "unreachable|no route to host": "there is no route to the host",
    "timed ?out": "timed out",
    "incompletemessage|body error": "the connection was cut",
    "sending request": "sending the request failed",
}
"""Patterns in obstore's errors (in lower case) and what they mean. Causes come before their effects."""


class Listed(NamedTuple):
    """An object that a store lists."""

    url: Url
    version: Version


class TransientError(Exception):
    """A request failed, and may succeed if it is repeated. The message holds no address and no credentials.

    Attributes:
      since: the time.monotonic() of the last progress; None: now.
    """

    def __init__(self, reason: str, since: float | None = None) -> None:
        super().__init__(reason)
        self.since = time.monotonic() if since is None else since


class UnreachableError(TransientError):
    """No connection can be made to a store that this process has not reached yet, so its address may be wrong."""


class Client:
    """Requests to one bucket or host. obstore takes credentials from the environment, files or the cloud instance.

    Requests are repeated after transient errors, for up to `patience_s`. An answer that neither grows by 256 KiB
    nor ends in this time is a transient error, too. Before its first answer, a client gives up after 10 s without
    a connection. Raises FileNotFoundError if there is no such object or bucket, FeedError for other failures.
    """

    def __init__(self, base: str, patience_s: float) -> None:
        try:
            self._obstore = importlib.import_module("obstore")
            from_url = importlib.import_module("obstore.store").from_url
        except ModuleNotFoundError as error:
            raise ImportError(
                f"obstore reads {base} and is not installed; from the clone: pip install '.[stores]'"
            ) from error
        self._base, self._patience_s, self._hedging = base, patience_s, Hedging()
        self._warned = -math.inf
        self._path = str if Url(base, "").can_list else unquote  # addresses copied from a browser have %20
        self._answered = False  # once True, errors of the connection or the credentials are transient
        try:
            # no retries by obstore, since only those of this class are counted, and stop at the interpreter's exit
            self._store = from_url(base, client_options=_CLIENT, retry_config={"max_retries": 0})
        except Exception as error:  # noqa: BLE001  obstore raises many types
            rule = "must be described by the environment of this process"
            raise self._refused(rule, _reason(error), "") from None

    async def version(self, key: str) -> Version:
        """The present version of an object. FeedError: also if it could be replaced unnoticed (`check_strong`)."""
        return await self._patiently(key, functools.partial(self._version, key))

    async def _version(self, key: str) -> Version:
        request = self._obstore.get_async(self._store, self._path(key), options={"head": True})
        found = await self._asked(key, request)
        if str(found.attributes.get("Content-Type", "")).startswith("text/html"):
            raise self._refused("must answer with data", "a web page (text/html), such as a sign-in page", key)
        version = _version_in(found.meta)
        version.check_strong(f"{self._base}/{key}")
        return version

    async def get(self, key: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes `start` to `stop` of an object. FeedError: also if the object has another version by now."""
        request = functools.partial(self._get, key, start, stop, version)
        data = await self._patiently(key, functools.partial(self._hedging.first, stop - start, request))
        fetcher().counts.fetched_bytes += len(data)
        return data

    async def _get(self, key: str, start: int, stop: int, version: Version) -> bytes:
        request = self._obstore.get_async(self._store, self._path(key), options={"range": (start, stop)})
        try:
            found = await self._asked(key, request)
        except TransientError as error:
            if "416" in str(error):
                version.compare(await self._version(key), f"{self._base}/{key}")
            raise
        version.compare(_version_in(found.meta), f"{self._base}/{key}")
        stream = found.stream(min_chunk_size=_PROGRESS_BYTES)
        data = b"".join([part async for part in self._each(key, stream)])
        if len(data) != stop - start:
            raise TransientError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    async def listed(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin with `prefix`, sorted."""
        return await self._patiently(prefix, functools.partial(self._listed, prefix))

    async def _listed(self, prefix: str) -> list[Listed]:
        folder = prefix.rpartition("/")[0]
        found: list[Listed] = []
        stream = self._obstore.list(self._store, folder or None, chunk_size=1000)
        async for chunk in self._each(prefix, stream):
            found += [Listed(Url(self._base, meta["path"]), _version_in(meta)) for meta in chunk]
        return sorted(each for each in found if each.url.key.startswith(prefix))

    async def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly in the folder `prefix`, sorted."""
        return await self._patiently(prefix, functools.partial(self._folders, prefix))

    async def _folders(self, prefix: str) -> list[str]:
        request = self._obstore.list_with_delimiter_async(self._store, prefix or None)
        found = await self._asked(prefix, request)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    async def _each(self, key: str, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """The parts of a stream. Each part must arrive within the patience."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self._asked(key, anext(stream))

    async def _asked(self, key: str, request: Awaitable[T]) -> T:
        """Wait for the answer to a request. Raises the errors of `Client`, or a TransientError."""
        limit_s, began = max(self._patience_s, _SHORTEST_S), time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                found = await request
        except TimeoutError:
            raise TransientError(f"no progress in {limit_s:g} s", began) from None
        except StopAsyncIteration:
            raise
        except Exception as error:  # noqa: BLE001  obstore raises many types
            raise self._meaning(error, key, began) from None
        self._answered = True
        return found

    async def _patiently(self, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Call `request`, repeat it after transient errors within the patience, and return its result."""
        name, failing_since, pause = f"{self._base}/{key}", None, _FIRST_PAUSE_S
        while True:
            try:
                async with fetcher().slots:
                    fetcher().counts.requests += 1
                    return await request()
            except TransientError as error:
                failing_since = error.since if failing_since is None else failing_since
                failing_s, reason = time.monotonic() - failing_since, str(error)
                limit_s, rule, remedy = self._patience_s, f"answer within patience_s={self._patience_s:g}", _WAIT
                if isinstance(error, UnreachableError):
                    limit_s = min(limit_s, _UNREACHABLE_S)
                    rule, remedy = "be reachable when it is opened", _FIND
            if failing_s >= limit_s:
                if not self._answered:  # keep it if the address is proven: a new client gives up after 10 s
                    self._replace()
                raise FeedError(
                    f"a store must {rule}, and {name} failed for {failing_s:.0f} s, last with: {reason}; {remedy}",
                    stage="read",
                    file=name,
                )
            fetcher().counts.retries += 1
            now = time.monotonic()
            if failing_s >= _WARN_AFTER_S and now >= self._warned + _WARN_EVERY_S:
                self._warned = now
                _log.warning(
                    "a store has failed for %.0f s, and is asked again until it has failed for %g s: %s: %s",
                    failing_s,
                    limit_s,
                    name,
                    reason,
                )
            draw = random.SystemRandom()  # not the module's own generator, which the user may have seeded
            await asyncio.sleep(min(pause * draw.uniform(0.5, 1.0), limit_s - failing_s))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _meaning(self, error: Exception, key: str, began: float) -> Exception:
        """Return the error to raise for obstore's `error`. The request for `key` began at the time `began`."""
        kind, text, reason = type(error).__name__, str(error), _reason(error)
        is_unreachable = "ConnectError(" in text or "kind: Connect" in text
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        if "NoSuchBucket" in text or (kind == "GenericError" and status == 404):
            self._replace()
            return FileNotFoundError(
                f"there is no bucket {self._base}; check its name, and the server's (AWS_ENDPOINT_URL)"
            )
        if isinstance(error, FileNotFoundError) and status != 405:
            return FileNotFoundError(f"there is no object {self._base}/{key}; check the address and the bucket")
        said = text.replace(f"/{key}", "").replace(f"/{self._base.rpartition('/')[2]}", "").lower()
        may_not = kind in ("PermissionDeniedError", "UnauthenticatedError")
        if kind == "NotSupportedError":
            reason = "an answer that is not a range, such as a sign-in page"
        for is_broken, rule in (
            (status == 405, "must answer HEAD requests, which ask for size and version"),
            (may_not or ("credential" in said and not self._answered), "must let this process read it"),
            ("redirect" in said, "must be asked in its own region (AWS_REGION)"),
            ("certificate" in said, "must have a certificate that this machine trusts"),
            (kind == "NotSupportedError", "must answer requests for ranges of bytes"),
            ("builder error" in text, "must have an address"),
            (kind == "InvalidPathError", "must list no key with an empty part (//) or a control character"),
            (400 <= status < 500 and status not in _TRANSIENT, "must answer requests"),
        ):
            if is_broken:
                return self._refused(rule, reason, key)
        return (UnreachableError if is_unreachable and not self._answered else TransientError)(reason, began)

    def _replace(self) -> None:
        """Drop this client after a failure, so that the next request reads the corrected environment."""
        if clients.get(key := (self._base, self._patience_s)) is self:
            clients.pop(key, None)

    def _refused(self, rule: str, found: str, key: str) -> FeedError:
        name = f"{self._base}/{key}"
        self._replace()
        return FeedError(
            f"a store {rule}, and {name} failed with {found}; check the address and the credentials, which are "
            "taken from the environment as obstore documents it (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, "
            "AWS_SKIP_SIGNATURE, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME …)",
            stage="read",
            file=name,
        )


clients: dict[tuple[str, float], Client] = {}


def client_of(base: str, patience_s: float) -> Client:
    """The client of a bucket or a host."""
    key = base, patience_s
    return clients.get(key) or clients.setdefault(key, Client(*key))


class RemoteObject(NamedTuple):
    """One version of an object in a store."""

    url: Url
    version: Version
    patience_s: float

    async def fetch(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the object. Errors: see `Client.get`."""
        return await client_of(self.url.base, self.patience_s).get(self.url.key, start, stop, self.version)


def _version_in(meta: Any) -> Version:
    """The version of an object, from its entry in a listing or the metadata of an answer."""
    given, date, size = meta["e_tag"] or "", meta["last_modified"].replace(microsecond=0), int(meta["size"])
    tag = given.strip('"')  # some stores put quotes around it only in listings, or only in answers
    is_date = tag == f"{int(date.timestamp()):x}-{size:x}"  # nginx's tag is made of date and size
    if tag and not given.startswith("W/") and not is_date:
        return Version(size, tag)
    is_settled = 0 < date.timestamp() < time.time() - _SETTLED_S  # obstore gives 1970 if the store names no date
    return Version(size, str(date) if is_settled else "")


def _reason(error: Exception) -> str:
    """Describe an error of obstore without the address and credentials that its text may contain."""
    text = str(error)
    if status := _STATUS.search(text):
        return f"{status[1]} {status[2]}"
    causes = (meaning for cause, meaning in _CAUSES.items() if re.search(cause, text.lower()))
    return next(causes, type(error).__name__)
