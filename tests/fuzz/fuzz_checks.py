"""What becomes of one input of `fuzz.py`, in a child process."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import fuzz_inputs
import fuzz_readers
import numpy as np
from fuzz_outcome import Outcome
from written_formats import COUNT

READ_BYTES = 64 << 20
"""The most that is read of an input whose changed header promises wide rows."""


def outcome_of(kind: str, path: Path, chance: random.Random) -> Outcome:
    """The outcome of opening and reading a damaged file.

    Args:
      kind: the format.
      path: the damaged file; of an index, its file, which is whole.
    """
    from feedline import FeedError

    try:
        reader = fuzz_readers.reader_of(kind)
        return _read(kind, path, chance) if reader is None else reader(path)
    except (ValueError, TypeError, FeedError, FileNotFoundError) as error:
        message = f"{type(error).__name__}: {error}"
        if path.name not in message and not (kind == "dataset" and "this dataset" in message):
            return Outcome("error without the file's name", message)
        if len(message) > 3000:
            return Outcome("an error of more than 3000 characters", message)
        return Outcome("refused", message)
    except Exception as error:  # noqa: BLE001  # of any type: the outcome contains it
        return Outcome("an error of another type", f"{type(error).__name__}: {error}")


def mutate(kind: str, path: Path, valid: Path, chance: random.Random) -> None:
    """Write the damaged input at `path`: a file, a folder, or a whole file with a damaged index."""
    import fuzz_mutations
    import fuzz_seals

    seal = fuzz_seals.SEALS.get(kind)
    if " index" not in kind:
        fuzz_mutations.write_mutated(path, valid, chance, seal or fuzz_mutations.mutated)
        for beside in valid.parent.glob(f"{valid.stem}.*"):  # the tokens of an index
            if beside != valid:
                shutil.copyfile(beside, path.with_suffix(beside.suffix))
        return
    shutil.copy2(valid, path)  # with its time of modification, to which the index belongs
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
    source = fuzz_readers.opened(kind, path)
    again = pickle.loads(pickle.dumps(source)) if chance.random() < 0.1 else source
    case = fuzz_inputs.ALL_CASES.get(fuzz_inputs.OF_FORMATS.get(kind, ""))
    outcome = compared(again, chance, case)
    source.close()
    if outcome.kind == "other rows" and case is not None and case.has_checksums and "resealed" not in kind:
        return _checked(again, case, outcome)
    return outcome


def _checked(source: Any, case: Any, outcome: Outcome) -> Outcome:
    """Other rows of a format with checksums: fewer or in another order, but none that was not written."""
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
    if hasattr(source, "records"):
        return _compared_records(source, order, case)
    return _compared_columns(source, order, case)


def _compared_records(source: Any, order: list[int], case: Any) -> Outcome:
    def read(rows: list[int]) -> list[Any]:
        return [_plain(record) for record in source.records(np.array(rows, np.int64))]

    first = read(order)
    if first != read(order):
        return Outcome("a second read gives other rows")
    for i in (0, 1, len(order) // 2):
        if read([order[i]]) != [first[i]]:
            return Outcome("a row alone is another one than in a batch")
    source.file_of(order[-1])
    if case is not None and len(source) == COUNT and first == [_plain(case.row(row)) for row in order]:
        return Outcome("right")
    return Outcome("other rows", f"{len(source)} records"[:200])


def _plain(record: Any) -> list[Any]:
    parts = [record[name] for name in sorted(record)] if isinstance(record, dict) else [record]
    return [part if isinstance(part, bytes | int) else part.tolist() for part in parts]


def _compared_columns(source: Any, order: list[int], case: Any) -> Outcome:
    import jax

    leaves = jax.tree.leaves(source.spec)
    wide = sum(int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize for leaf in leaves)
    order = order[: max(1, READ_BYTES // max(1, wide))]
    if wide > READ_BYTES:
        return Outcome("other rows", f"rows of {wide} bytes, not read")

    def read(asked: list[int], filling: int) -> Any:
        def buffer(leaf: Any) -> Any:
            size = len(asked) * int(np.prod(leaf.shape)) * leaf.dtype.itemsize
            return np.frombuffer(bytearray([filling]) * size, leaf.dtype).reshape(len(asked), *leaf.shape)

        out = jax.tree.map(buffer, source.spec)
        source.read(np.array(asked, np.int64), out)
        return out

    def same(a: Any, b: Any) -> bool:
        """Whether dtypes, shapes and bytes are equal: NaN is itself."""
        form = [jax.tree.map(lambda leaf: (leaf.dtype.str, leaf.shape, leaf.tobytes()), tree) for tree in (a, b)]
        return bool(form[0] == form[1])

    first = read(order, 0)
    if not same(first, read(order, 255)):
        return Outcome("not all of the buffer written")
    for i in (0, 1, len(order) // 2):
        i %= len(order)
        if not same(read([order[i]], 255), jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], first)):
            return Outcome("a row alone is another one than in a batch")
    if case is not None and len(source) == COUNT:
        expected = case.expected(np.array(order))
        kinds = [jax.tree.map(lambda leaf: leaf.dtype.kind, tree) for tree in (expected, first)]
        if kinds[0] == kinds[1]:  # numbers of text have 64 bits
            expected = jax.tree.map(lambda leaf, found: leaf.astype(found.dtype), expected, first)
        if same(first, expected):
            return Outcome("right")
    return Outcome("other rows", f"{len(source)} rows of {source.spec}"[:200])


class RestoredFeed:
    """A feed of one kind that restores mutations of its state."""

    def __init__(self, kind: str) -> None:
        import jax
        from jax.sharding import SingleDeviceSharding

        import feedline

        self._feed = feedline.Feed(_source(kind), 8, SingleDeviceSharding(jax.devices()[0]), prefetch=0)
        next(self._feed)
        next(self._feed)
        self._state = self._feed.get_state()

    def resumed(self, chance: random.Random) -> Outcome:
        """The outcome of restoring a mutation of the state."""
        import fuzz_mutations
        import jax

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
