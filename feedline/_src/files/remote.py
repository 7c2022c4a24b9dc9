"""`RemoteFile`: an object in a store, whose blocks are read from the cache on local disk."""

from __future__ import annotations

import concurrent.futures
import io
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, cast

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import AHEAD, BLOCK_BYTES, cache_of
from feedline._src.files.cached_range import CachedRange, blocks_of
from feedline._src.files.client import RemoteObject, client_of
from feedline._src.files.fetcher import AT_ONCE, MOST, fetcher, gathered, result_of
from feedline._src.files.file import Bytes, File, Indices, OpenFile, T, Version, place_in
from feedline._src.files.mapped import MappedObject
from feedline._src.files.store import Store, Url
from feedline._src.native.library import library
from feedline._src.rows.shards import offsets_by_label

_log = logging.getLogger("feedline")
_WHOLE_TRIES = 10
_HEADER_BYTES = 1 << 14  # the least that a file object reads at once, for headers
_EXACT_BYTES = 1 << 17  # a read up to this size, such as a footer, fetches exactly its bytes, not whole blocks
_SMALL_BYTES = 1 << 18  # `samples` fetches an object up to this size whole
_DOWNLOADS = 8  # whole objects that are downloaded at once, each by many requests


class RemoteFile(File):
    """A `File` that is an object in a store. It is cached in pieces of up to 64 MiB, each a `CachedRange`."""

    in_store = True
    version: Version

    def __init__(self, url: Url, version: Version, options: Store) -> None:
        self.name, self.version, self.size = str(url), version, version.size_bytes
        self._object, self._options = RemoteObject(url, version, options.patience_s), options
        self.cache = cache_of(options)
        self._step = self.cache.piece_bytes
        starts = range(0, self.size, self._step)
        self._pieces = [self._range(start, min(start + self._step, self.size)) for start in starts]
        self._complete = 0
        """How many leading pieces were found complete in the cache. They are not checked again at each read."""
        self._mapped: MappedObject | None = None
        self._bytes = self._range(0, self.size)  # for the whole file
        self._whole: OpenFile | None = None

    def _range(self, start: int, stop: int) -> CachedRange:
        return CachedRange(self.cache, self._object, start, stop)

    # --- read ---

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        lengths = np.clip(self.size - offsets, 0, lengths)
        for request in self.fetch(blocks_of(offsets, offsets + lengths)):  # for all pieces at once
            result_of(request, self.name)
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for part, (start, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            while length:
                number, offset = divmod(start, self._step)
                taken = min(length, self._step - offset)
                wanted.setdefault(number, []).append((part, offset, taken))
                start, length = start + taken, length - taken
        found = [b""] * len(offsets)
        for number in sorted(wanted):
            parts, starts, sizes = zip(*wanted[number], strict=True)
            read = self._pieces[number].read(np.array(starts), np.array(sizes))
            for part, data in zip(parts, read, strict=True):
                found[part] += data
        return found

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        if library() is None or not out.size or not out.flags.carray:  # C-contiguous and writeable
            super().read_rows(offsets, out)
            return
        stops, step = offsets + out.shape[1], self._step
        for request in self.fetch(blocks_of(offsets, np.minimum(stops, self.size))):
            result_of(request, self.name)
        is_inside = (offsets // step == (stops - 1) // step) & (stops <= self.size)  # within one piece
        inside, left = np.flatnonzero(is_inside), np.flatnonzero(~is_inside)
        for number, at in offsets_by_label(offsets[inside] // step, len(self._pieces)):
            places = inside[at]
            if not self._pieces[number].read_rows(offsets[places] - number * step, places, out):
                left = np.append(left, places)
        if len(left):
            rows = np.empty((len(left), out.shape[1]), np.uint8)
            super().read_rows(offsets[left], rows)
            out[left] = rows

    # --- fetch ---

    def fetch(self, blocks: Indices) -> list[concurrent.futures.Future[None]]:
        """Start fetching these ascending blocks, except those known to be in the cache. Returns the requests."""
        return [request for piece, some in self._by_piece(blocks) for request in piece.fetch(some)]

    def _by_piece(self, blocks: Indices) -> Iterator[tuple[CachedRange, list[int]]]:
        """Yield each piece that has some of these ascending blocks, and the blocks' numbers in the piece."""
        each = self._step // BLOCK_BYTES
        for number, some in itertools.groupby(blocks.tolist(), lambda block: block // each):
            yield self._pieces[number], [block - number * each for block in some]

    def fetch_from(self, offset: int) -> None:
        """Start fetching the blocks that a sequential reader at `offset` needs next."""
        first = offset // BLOCK_BYTES
        most = min(MOST, int(self.cache.limit_bytes * AHEAD) // BLOCK_BYTES)
        if fetcher().in_flight < AT_ONCE:
            self.fetch(np.arange(first, min(-(-self.size // BLOCK_BYTES), first + most)))

    def is_near(self, start: int, stop: int) -> bool:
        """Whether all blocks with bytes `start` to `stop` are known to be in the cache, or are in flight."""
        blocks = blocks_of(np.array([start]), np.array([min(stop, self.size)]))
        return all(piece.is_near(block) for piece, some in self._by_piece(blocks) for block in some)

    def close(self) -> None:
        """Cancel requests in flight, and unlock `_whole` for eviction."""
        self._whole = None
        for each in (*self._pieces, self._bytes):
            each.cancel()

    # --- mapped ---

    def memory(self) -> Bytes | None:
        """See `File.memory`. Also None without the C library: only its gather survives a truncated file."""
        mapped = self._mapped
        if mapped is None and library() is not None:
            complete = self._complete  # a copy, because other threads change it, too
            while complete < len(self._pieces) and self._pieces[complete].verified.all():
                complete += 1
            self._complete = complete
            if complete == len(self._pieces):
                mapped = self._mapped = MappedObject.of(self._pieces)
                if mapped is None:  # a piece was evicted since then
                    self._complete = 0
        return None if mapped is None else mapped.memory

    def check(self) -> None:
        """Drop the mapping; `memory` maps intact files again. Each fetch checks the object's version."""
        self._mapped = None

    def check_open(self) -> None:
        """Check up to 16 mapped pieces, in turn. If one was deleted or written to, drop the mapping, and verify
        all pieces again: what was read may be wrong. (`with_path` checks the whole file itself.)
        """
        mapped = self._mapped
        if mapped is not None and not mapped.is_current():
            self._mapped = None
            for piece in self._pieces:
                piece.forget()

    # --- as a file object, and in samples ---

    def open(self, sequential: bool = False) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_OpenObject(self, sequential), _HEADER_BYTES))

    def start_samples(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        if self._whole is not None:
            return lambda: self.with_path(lambda path: File(path).samples(ranges))
        request = fetcher().run(self._samples(ranges))
        return lambda: result_of(request, self.name)

    async def _samples(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if self.size <= _SMALL_BYTES:
            data = await self._bytes.all()
            return [data[at : at + length] for at, length in ranges]
        spans = [(min(at, self.size), min(at + length, self.size)) for at, length in ranges]
        return await gathered(self._range(*span).all() for span in spans)

    def places_beside(self, suffix: str) -> list[str]:
        return [place_in(self._options.folder, f"{self.name} {self.version.stamp}", suffix)]

    # --- whole, for a library that opens files by path ---

    def with_path(self, use: Callable[[str], T]) -> T:
        for _ in range(_WHOLE_TRIES):
            whole = self.whole()
            try:
                found = use(whole.path)
            except Exception:
                if whole.is_at_its_path:
                    raise
            else:
                if whole.is_at_its_path:
                    return found
        raise self._bytes.unstable(_WHOLE_TRIES)

    def whole(self, cancelled: threading.Event | None = None) -> OpenFile:
        """Return the whole file of the object, and fetch it if necessary. `cancelled`: see `CachedRange.whole`."""
        whole = self._whole
        if whole is None or not whole.is_at_its_path:
            whole = self._whole = self._bytes.whole(cancelled)
        return whole


def fetch_whole(files: Sequence[RemoteFile]) -> None:
    """Fetch objects as whole files. FeedError: also if the cache is too small for all of them."""
    size, limit_bytes = sum(file.size for file in files), files[0].cache.limit_bytes
    if size > limit_bytes:
        raise FeedError(
            "files of this format are opened by path, so the cache must hold all of them, and they have "
            f"{size} bytes, more than cache_bytes={limit_bytes}; raise cache_bytes of feedline.Store, or convert "
            "them to TFRecord, which is read in parts",
            stage="read",
            file=files[0].name,
        )
    _log.info("%d objects, %d bytes in all, are downloaded unless the cache has them", len(files), size)
    threads, cancelled = concurrent.futures.ThreadPoolExecutor(_DOWNLOADS), threading.Event()
    try:
        list(threads.map(lambda file: file.whole(cancelled), files))
    except BaseException:
        cancelled.set()  # before `close`, so that a thread that starts its requests later cancels them
        for file in files:
            file.close()
        raise
    finally:
        threads.shutdown(wait=False)  # Ctrl-C must not wait for another process's fetch


def open_objects(urls: Sequence[str], options: Store) -> dict[str, RemoteFile]:
    """Open objects in their present versions. All versions are requested at once, to save round trips."""
    cache_of(options)  # raises its errors before any request
    parsed = [Url.parse(url) for url in urls]
    requests = (client_of(url.base, options.patience_s).version(url.key) for url in parsed)
    versions = fetcher().run(gathered(requests)).result()
    files = [RemoteFile(url, version, options) for url, version in zip(parsed, versions, strict=True)]
    return dict(zip(urls, files, strict=True))


class _OpenObject(io.RawIOBase):
    """A file object over a `RemoteFile`. Small reads fetch only their bytes, not whole blocks. For one thread."""

    def __init__(self, file: RemoteFile, sequential: bool) -> None:
        self._file, self._sequential, self._at = file, sequential, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        at, wanted = self._at, len(buffer)
        if self._sequential:
            self._file.fetch_from(at)
        if self._sequential or wanted > _EXACT_BYTES or self._file.is_near(at, at + wanted):
            (data,) = self._file.read(np.array([at]), np.array([wanted]))
        else:
            (data,) = self._file.samples([(at, wanted)])
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
