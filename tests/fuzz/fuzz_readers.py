"""Readers that `fuzz.py` tries beside `open_source`: each takes a damaged file and gives the outcome."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_inputs
import numpy as np
from fuzz_outcome import Outcome

Reader = Callable[[Path], Outcome]


def reader_of(kind: str) -> Reader | None:
    """The reader of a kind; None: `open_source`."""
    if kind.startswith("image "):
        return _image
    return {
        "cache": _cached, "lane files": _lanes, "lane file": _lanes, "log": _log,
    }.get(kind)  # fmt: skip


def opened(kind: str, path: Path) -> Any:
    """The source of a file: opened from its path, from a store, or by `datasets`."""
    import feedline

    if kind == "dataset":
        return feedline.open_source(_dataset(path))
    case = fuzz_inputs.ALL_CASES.get(fuzz_inputs.OF_FORMATS.get(kind, ""))
    options: dict[str, Any] = {} if case is None else case.options
    if not kind.startswith("remote "):
        return feedline.open_source(path, **options)
    store = _server()
    names = [file for one in path.parent.glob(f"{path.stem}.*") for file in (one, *one.rglob("*"))]
    files = [file for file in names if file.is_file()]
    store.objects = {f"/{file.relative_to(path.parent)}": file.read_bytes() for file in files}
    cache = path.parent / "cache"
    if len(store.requests) > 200:  # a source counts the files of its cache
        store.requests.clear()
        shutil.rmtree(cache)
    cached = feedline.Store(cache=str(cache), cache_bytes=1 << 28, patience_s=1)
    return feedline.open_source(f"{store.url}/{path.name}", store=cached, **options)


def _dataset(path: Path) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_file(str(path))
    except Exception as error:  # not feedline's reader
        raise ValueError(f"{path}: {type(error).__name__}: {error}"[:2000]) from error


@functools.cache
def _server() -> Any:
    """A store in this process, until it ends."""
    sys.path.append(str(Path(__file__).parent.parent))
    from store_server import serving

    context = serving()
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()


def _cached(path: Path) -> Outcome:
    """A damaged block of the cache of stores: it is fetched again."""
    from feedline._src.files.cache import Cache

    cache = Cache(str(path.parent / "cache"), 1 << 30)
    place = Path(cache.path("block"))
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
    found = cache.get("block", len(fuzz_inputs.BLOCK))
    if found is None:
        return Outcome("refused")
    right = found == fuzz_inputs.BLOCK
    return Outcome("right" if right else "a wrong row in spite of a checksum")


def _lanes(path: Path) -> Outcome:
    """Damaged files of lanes. JSON without a checksum: another number is another state."""
    from feedline import load_lanes

    state = load_lanes(path)
    json.dumps(state)
    return Outcome("right" if state == fuzz_inputs.LANES else "other rows", str(state)[:200])


def _log(path: Path) -> Outcome:
    """A run that continues the log of an earlier one."""
    from feedline._src.trainer.logs import CSVLog
    from feedline._src.trainer.loop import Progress

    with CSVLog(path) as log:
        log(Progress(30, {"loss": 0.5}, 20, rows=640, elapsed_s=0.5, elapsed_rows=576, wait_s=0.125))
    lines = path.read_text(errors="replace").splitlines()
    return Outcome("right" if len(lines) == 4 else "other rows", f"{len(lines)} lines")


def _image(path: Path) -> Outcome:
    """An image that is decoded, cropped and resized twice."""
    from feedline._src.images import ImageDecoder
    from feedline._src.sources.decoded import Row

    found = []
    for filling in (0, 255):
        for orient in (False, True):
            decode = ImageDecoder(8, "random", True, (0.08, 1.0), (0.75, 4 / 3), orient, None, None)
            out = {"image": np.full((8, 8, 3), filling, np.uint8)}
            try:
                decode(path.read_bytes(), out, Row(0, 0, 0, 7))
            except MemoryError:
                raise
            except Exception as error:  # any one makes a bad row, to which the feed adds the file
                raise ValueError(f"{path.name}: {error}") from error
            found.append(out["image"])
    if not (np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])):
        return Outcome("not all of the buffer written")
    return Outcome("other rows")
