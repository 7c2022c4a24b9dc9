"""What becomes of one input of `fuzz.py`, in a child process."""

from __future__ import annotations

import atexit
import functools
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import fuzz_inputs
import fuzz_mutations
import fuzz_seals
import jax
import numpy as np
from fuzz_inputs import Outcome
from written_formats import COUNT

READ_BYTES = 64 << 20
"""The most that is read of an input whose changed header promises wide rows."""


def outcome_of(kind: str, path: Path, chance: random.Random) -> Outcome:
    """The outcome of opening and reading a damaged file.

    Args:
      kind: the format.
      path: the damaged file; if the index is damaged, the file that it belongs to, which is valid.
    """
    from feedline import FeedError

    others = {"cache": _cached, "lane files": _lanes, "lane file": _lanes, "image": _image}
    try:
        reader = others.get("image" if kind.startswith("image ") else kind)
        return _read(kind, path, chance) if reader is None else reader(path)
    except (ValueError, TypeError, FeedError, FileNotFoundError) as error:
        message = f"{type(error).__name__}: {error}"
        names = ("this dataset", "file datasets.Dataset") if kind == "dataset" else ()
        if not any(name in message for name in (path.name, *names)):
            return Outcome("error without the file's name", message)
        if len(message) > 3000:
            return Outcome("an error of more than 3000 characters", message)
        return Outcome("refused", message)
    except Exception as error:  # noqa: BLE001  # of any type: the outcome contains it
        return Outcome("an error of another type", f"{type(error).__name__}: {error}")


def mutate(kind: str, path: Path, valid: Path, chance: random.Random) -> None:
    """Write the damaged input at `path`: a file, a folder, or a whole file with a damaged index."""
    seal = fuzz_seals.SEALS.get(kind)
    if " index" not in kind:
        fuzz_mutations.write_mutated(path, valid, chance, seal or fuzz_mutations.mutated)
        for beside in valid.parent.glob(f"{valid.stem}.*"):  # the .bin beside an .idx
            if beside != valid:
                shutil.copyfile(beside, path.with_suffix(beside.suffix))
        return
    shutil.copy2(valid, path)  # with its time of modification, which the index has stored
    index = valid.with_name(f".{valid.name}.feedline-index").read_bytes()
    changed = (seal or fuzz_mutations.mutated)(index, chance)
    path.with_name(f".{path.name}.feedline-index").write_bytes(changed)


def remove(path: Path) -> None:
    """Delete an input and its index."""
    for beside in path.parent.glob(f"{path.stem}.*"):
        shutil.rmtree(beside) if beside.is_dir() else beside.unlink()
    for beside in (f".{path.name}.feedline-index", f".{path.name}.tmp"):
        path.with_name(beside).unlink(missing_ok=True)


def _read(kind: str, path: Path, chance: random.Random) -> Outcome:
    source = _opened(kind, path)
    again = pickle.loads(pickle.dumps(source)) if chance.random() < 0.1 else source
    case = fuzz_inputs.ALL_CASES.get(fuzz_inputs.OF_FORMATS.get(kind, ""))
    outcome = compared(again, chance, case)
    source.close()
    if outcome.kind == "other rows" and case is not None and case.has_checksums and "resealed" not in kind:
        return _checked(again, case, outcome)
    return outcome


def _checked(source: Any, case: Any, outcome: Outcome) -> Outcome:
    """A format with checksums may give fewer rows, or another order, but no row that was not written."""
    written = {repr(case.row(row)) for row in range(COUNT)}
    for row in range(min(len(source), 10 * COUNT)):
        if repr(source[row]) not in written:
            return Outcome("a wrong row in spite of a checksum", repr(source[row])[:200])
    return outcome


def compared(source: Any, chance: random.Random, case: Any) -> Outcome:
    """Compare the rows of a source with those of the valid file, and with a second read."""
    _ = source.identity
    last = len(source) - 1
    order = [0, last, *(chance.randint(0, last) for _ in range(30)), *range(min(len(source), 2 * COUNT))]
    leaves = [] if hasattr(source, "records") else jax.tree.leaves(source.spec)
    wide = sum(int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize for leaf in leaves)
    if wide > READ_BYTES:
        return Outcome("other rows", f"rows of {wide} bytes, not read")
    order = order[: max(1, READ_BYTES // max(1, wide))]
    first = _rows(source, order, 0)
    if first != _rows(source, order, 255):
        return Outcome("a second read gives other rows, or does not write all of its buffer")
    for i in (0, 1 % len(order), len(order) // 2):
        if _rows(source, [order[i]], 255) != [first[i]]:
            return Outcome("a row alone is another one than in a batch")
    source.file_of(order[-1])
    if case is not None and len(source) == COUNT:
        if not leaves:
            expected = [_plain(case.row(row)) for row in order]
        else:
            arrays = jax.tree.leaves(case.expected(np.array(order)))
            if not all(isinstance(array, np.ndarray) for array in arrays):  # a column of text became numbers
                return Outcome("other rows", f"{source!r:.200}")
            written = zip(arrays, leaves, strict=False)
            expected = _by_row([a.astype(b.dtype) if a.dtype.kind == b.dtype.kind else a for a, b in written])
        if first == expected:
            return Outcome("right")
    return Outcome("other rows", f"{source!r:.200}")


def _rows(source: Any, rows: list[int], filling: int) -> list[list[Any]]:
    """Of each row the values, or for columns the bytes (NaN equals NaN), read into buffers full of `filling`."""
    if hasattr(source, "records"):
        return [_plain(record) for record in source.records(np.array(rows, np.int64))]

    def buffer(leaf: Any) -> Any:
        size = len(rows) * int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        return np.frombuffer(bytearray([filling]) * size, leaf.dtype).reshape(len(rows), *leaf.shape)

    out = jax.tree.map(buffer, source.spec)
    source.read(np.array(rows, np.int64), out)
    return _by_row(jax.tree.leaves(out))


def _by_row(leaves: list[Any]) -> list[list[bytes]]:
    return [[row.tobytes() for row in rows] for rows in zip(*leaves, strict=True)]


def _plain(record: Any) -> list[Any]:
    parts = [record[name] for name in sorted(record)] if isinstance(record, dict) else [record]
    return [part if isinstance(part, bytes | int) else part.tolist() for part in parts]


class RestoredFeed:
    """A feed of one kind that restores mutations of its state."""

    def __init__(self, kind: str) -> None:
        import feedline

        self._feed = feedline.Feed(
            _source(kind), 8, jax.sharding.SingleDeviceSharding(jax.devices()[0]), prefetch=0
        )
        next(self._feed)
        next(self._feed)
        self._state = self._feed.get_state()

    def resumed(self, chance: random.Random) -> Outcome:
        """The outcome of restoring a mutation of the state."""
        state = fuzz_mutations.mutated_state(self._state, chance)
        mutated = json.dumps(state)
        try:
            self._feed.set_state(state)
        except (ValueError, TypeError) as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # of any type: the outcome contains it
            return Outcome("set_state failed otherwise", f"{type(error).__name__}: {error}: {mutated}")
        try:
            batch = next(self._feed)
        except BaseException as error:  # noqa: BLE001  # StopIteration, too
            if isinstance(error, ValueError) and "cannot go on from its state" in str(error):
                return Outcome("refused by the next batch", str(error))  # only Grain can check its part of a state
            return Outcome("accepted, and then failed", f"{type(error).__name__}: {error}: {mutated}")
        shapes = {leaf.shape for leaf in jax.tree.leaves(batch)}
        return Outcome("accepted" if shapes == {(8,)} else "accepted, and then another shape", mutated)


def _source(kind: str) -> Any:
    import grain

    import feedline

    def make_lane(lane: int, count: int) -> Any:
        return grain.MapDataset.range(lane, 40, count).to_iter_dataset()

    numbers = np.arange(40, dtype=np.int32)
    if kind == "rows state":
        return numbers
    if kind == "lanes state":
        return feedline.Lanes(make_lane, 2)
    sources = {"a": {"x": numbers}, "b": {"x": numbers[:7]}}
    return feedline.Mixture(sources, weights={"a": 0.7, "b": 0.3})


# --- readers ---


def _opened(kind: str, path: Path) -> Any:
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
    if len(store.requests) > 200:  # each source counts all files of its cache
        store.requests.clear()
        shutil.rmtree(cache)
    cached = feedline.Store(cache=str(cache), cache_bytes=1 << 28, patience_s=1)
    return feedline.open_source(f"{store.url}/{path.name}", store=cached, **options)


def _dataset(path: Path) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_file(str(path))
    except Exception as error:  # of `datasets`, not of feedline
        raise ValueError(f"{path}: {type(error).__name__}: {error}"[:2000]) from error


@functools.cache
def _server() -> Any:
    """A store that this process serves until it ends."""
    from store_server import serving

    context = serving()
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()


def _cached(path: Path) -> Outcome:
    """The outcome of a damaged block of the cache of stores: "refused" means that it would be fetched again."""
    block = fuzz_inputs.cached_block(path.parent / "cache")
    place = Path(block.path)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
    found = block.read_all()
    if found is None:
        return Outcome("refused")
    right = found == fuzz_inputs.BLOCK
    return Outcome("right" if right else "a wrong row in spite of a checksum")


def _lanes(path: Path) -> Outcome:
    """The outcome of damaged files of lanes. They have no checksum, so another number is another state."""
    from feedline import load_lanes

    state = load_lanes(path)
    json.dumps(state)
    return Outcome("right" if state == fuzz_inputs.LANES else "other rows", str(state)[:200])


def _image(path: Path) -> Outcome:
    """The outcome of an image that is decoded, cropped and resized twice."""
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
            except Exception as error:  # any error makes a bad row; the feed adds the file's name
                raise ValueError(f"{path.name}: {error}") from error
            found.append(out["image"])
    if not (np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])):
        return Outcome("not all of the buffer written")
    return Outcome("other rows")
