"""What is asked of a store: listings, versions, and bytes, whose samples detect an object that was replaced."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from feedline._src.files.client import RESAMPLED, Listed, Version, client_of, replaced
from feedline._src.files.fetcher import fetcher
from feedline._src.files.store import Store, Url

T = TypeVar("T")
_FOLDER_SUFFIX = ".zarr"
_MOST_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12


class _Sample(NamedTuple):
    """Bytes of an object from `start` on."""

    url: Url
    version: Version
    start: int
    data: bytes


class Origin:
    """Requests for objects of one source, which are repeated while the store fails. For the fetching thread.

    Invariant: what `fetch` returns of objects without a strong version came before the samples were found
    unchanged in the store, so it is of the same data, unless an object was replaced by one with the same samples.

    Args:
      patience_s: how long the store may fail.
      samples: those of another process that reads the same source.
    """

    def __init__(self, patience_s: float, samples: Sequence[_Sample] = ()) -> None:
        self._patience_s = patience_s
        self._samples = list(samples)
        """Of objects without a strong version; at most 16."""
        self._comparing = asyncio.Lock()
        self._calls = self._compared = 0
        """How often a comparison was asked for, and how many of these calls came before the last one began."""

    async def version(self, url: Url) -> Version:
        """The present version of an object. Raises FileNotFoundError or FeedError."""
        client = client_of(url.base)
        return await fetcher().patiently(
            str(url), self._patience_s, 0, lambda: client.version(url.key, self._patience_s)
        )

    async def sampled_version(self, url: Url) -> Version:
        """The present version of an object. If it is not strong, samples of the object are fetched, too."""
        try:
            version = await self.version(url)
        except FileNotFoundError:
            await client_of(url.base).check_bucket(self._patience_s)
            raise
        if version.is_strong:
            return version
        step = max(_SAMPLE_BYTES, -(-version.size_bytes // _MOST_SAMPLES))
        parts = [(at, min(at + _SAMPLE_BYTES, version.size_bytes)) for at in range(0, version.size_bytes, step)]
        found = await gathered(self._asked(url, version, *part) for part in parts)
        self._samples += [
            _Sample(url, version, at, bytes(data)) for (at, _), data in zip(parts, found, strict=True)
        ]
        digest = hashlib.sha256(b"".join(sample.data for sample in self._samples))
        return version._replace(sampled=digest.hexdigest()[:32])

    async def fetch(self, url: Url, version: Version, start: int, stop: int) -> Any:
        """Bytes `start` to `stop` of an object of this version, as a buffer.

        Raises:
          FileNotFoundError: there is no such object any more.
          FeedError: it was replaced, or cannot be read for `patience_s`.
        """
        data = await self._asked(url, version, start, stop)
        if not version.is_strong:
            if len(self._samples) < _MOST_SAMPLES:  # before: another first request compares this one's sample
                self._samples.append(_Sample(url, version, start, bytes(memoryview(data)[:_SAMPLE_BYTES])))
            await self._compare()
        return data

    async def _compare(self) -> None:
        """Refuse replaced objects by requests for the samples that begin after this call."""
        self._calls += 1
        call = self._calls
        async with self._comparing:  # one comparison serves all calls that wait for it
            if self._compared < call:
                calls = self._calls
                await gathered(map(self._check, self._samples))
                self._compared = calls

    async def _check(self, sample: _Sample) -> None:
        url, version, start, data = sample
        if bytes(await self._asked(url, version, start, start + len(data))) != data:
            raise replaced(str(url), RESAMPLED)

    async def _asked(self, url: Url, version: Version, start: int, stop: int) -> Any:
        client = client_of(url.base)
        return await fetcher().patiently(
            str(url),
            self._patience_s,
            stop - start,
            lambda: client.get(url.key, start, stop, version, self._patience_s),
        )

    def __reduce__(self) -> Any:
        return Origin, (self._patience_s, tuple(self._samples))


async def gathered(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, the others are cancelled. None goes on afterwards."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


REQUEST_BYTES = 1 << 22
"""The largest request, and what one in flight takes of memory."""


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
    """A glob as a regular expression, of what the module glob matches: "**/" stands for any folders."""
    *above, last = pattern.split("/")
    return "".join("(?:[^./][^/]*/)*" if part == "**" else f"{_part(part)}/" for part in above) + _part(last)


def _part(pattern: str) -> str:
    """A glob of one name as a regular expression: only one that begins with a dot matches hidden names."""
    parts = [] if pattern.startswith(".") else [r"(?!\.)"]
    for token in re.findall(r"\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if token in ("*", "?"):
            parts.append("[^/]" + token.replace("?", ""))
        elif len(token) > 2 and token[0] == "[":
            parts.append("(?!/)" + token.replace("[!", "[^", 1).replace("\\", r"\\"))
        else:
            parts.append(re.escape(token))
    return "".join(parts)
