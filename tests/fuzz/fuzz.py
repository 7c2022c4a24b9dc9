"""Does a damaged file or state ever cause silently wrong rows, an unhelpful error, a crash or a hang?

Small valid files of every declared format are mutated, on a local disk and in a store: bytes are flipped, cut,
inserted and zeroed, blocks swapped, numbers in headers replaced by zero, negative and huge ones. So are index
files, blocks of the cache of stores and saved lanes. Child processes open each of them, read rows twice (columns
into buffers that were filled differently), read some rows alone, and pickle some of the sources. States of feeds
of rows, lanes and a mixture are mutated as JSON and given to `set_state`.

Expected of a file: its rows are read correctly; or it is refused with an error that names it; or it gives other
rows, with the shapes and dtypes that its metadata now promise, unless its format has checksums. Expected of a
state: `set_state` refuses it with a ValueError or TypeError; or the next batch does, if only Grain can check it;
or that batch is delivered. Refuted by a read that leaves a part of its buffer unwritten or that differs the second
time, an error of another type or without the name of the file, a wrong row in spite of a checksum, a process that
dies or takes more memory than an input can need, an input that takes longer than --limit-s, and a state that is
accepted and fails later. Such inputs are saved in --folder, and the exit code is 1.

    python tests/fuzz/fuzz.py --inputs 10000             # of each format and state
    python tests/fuzz/fuzz.py --inputs 300 --format npy  # some of them; may be repeated
    python tests/fuzz/fuzz.py --format npy --only 17     # one input again, under the same --seed
    python tests/fuzz/fuzz.py --inputs 1000000 --minutes 90 --seed 1 --record fuzz.json  # about a million
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_checks import RestoredFeed, mutate, outcome_of, remove
from fuzz_inputs import FILES, FORMATS, STATES, Outcome

EXPECTED = ("right", "other rows", "refused", "refused by the next batch", "accepted")
"""Outcomes that refute nothing; any other one does."""
OF_A_LIBRARY = {
    *itertools.product(
        ("hdf5 text", "remote hdf5 text", "lmdb", "remote lmdb"), ("crash", "hang", "too much memory")
    ),
    *itertools.product(("hdf5", "hdf5 chunks", "remote hdf5", "remote hdf5 chunks"), ("too much memory",)),
    *itertools.product(("parquet", "parquet text", "remote parquet", "remote parquet text"), ("crash",)),
}
"""{(format, outcome)} that refute nothing: a library reads the damaged bytes by itself (docs/security.md)."""
_HANG_OF_A_LIBRARY_S = 5.0
_AT_ONCE = 20
MEMORY_BYTES = 12 << 30
"""The memory limit of a child, so that an allocation that is too large fails."""
MOST_KIB = 1 << 20
"""How much the memory of a child may grow by one input: what a header promises must not be allocated."""


def refutes(name: str, outcome: str) -> bool:
    """Whether an input of this format must not have this outcome."""
    return outcome not in EXPECTED and (name, outcome) not in OF_A_LIBRARY


class Input(NamedTuple):
    """One input, a function of its format, number and seed."""

    format: str
    number: int
    seed: int

    @property
    def chance(self) -> random.Random:
        """The random generator of its mutations."""
        return random.Random(f"{self.seed} {self.format} {self.number}")

    def write(self, folder: Path, valid: Path) -> Path:
        """Write its damaged file into a folder."""
        suffix = FILES[self.format][0]
        path = folder / f"{self.format.replace(' ', '-')}-{self.seed}-{self.number}{suffix}"
        mutate(self.format, path, valid / f"{self.format}{suffix}", self.chance)
        return path


# --- in a child process ---


def serve(pipe: Any, folder: Path) -> None:
    """Send the outcome of each input that comes. Valid files lie beside `folder`."""
    os.dup2(os.open(folder / "stderr.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    feeds = {kind: RestoredFeed(kind) for kind in STATES}
    pipe.send("ready")
    while True:
        given: Input = pipe.recv()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory_kib("VmRSS")
        if given.format in feeds:
            outcome = feeds[given.format].resumed(given.chance)
        else:
            path = given.write(folder, folder.parent / "valid")
            outcome = outcome_of(given.format, path, given.chance)
            remove(path)
        grown = memory_kib("VmHWM") - before
        if grown > MOST_KIB:
            outcome = Outcome("too much memory", f"{grown >> 10} MiB; {outcome}")
        pipe.send(outcome)


def memory_kib(name: str) -> int:
    """The memory of this process: VmRSS is what it has now, VmHWM the most since the last reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split(maxsplit=1)[0])


# --- in the parent ---


class Child:
    """A process that runs `serve`. Detects its death at once, and a hang after `limit_s`. One thread uses it."""

    def __init__(self, serve: Callable[[Any, Path], None], folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        folder.mkdir(exist_ok=True)
        processes = multiprocessing.get_context("spawn")
        self.pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=serve, args=(theirs, folder), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the child ends
        if not self.pipe.poll(120) or self.pipe.recv() != "ready":
            raise SystemExit(f"a child process did not start: {self._stderr()}")

    def _stderr(self) -> str:
        path = self._folder / "stderr.txt"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def outcome(self, kind: str) -> Outcome:
        """The outcome of the last input, of this kind. After a crash or a hang the child cannot be used again."""
        limit_s = min(self._limit_s, _HANG_OF_A_LIBRARY_S) if (kind, "hang") in OF_A_LIBRARY else self._limit_s
        if not self.pipe.poll(limit_s):
            return Outcome("hang", f"longer than {limit_s:g} s")
        try:
            return Outcome(*self.pipe.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            return Outcome("crash", f"exit code {self._process.exitcode}: {self._stderr()}")

    def close(self) -> None:
        """Kill the child, and wait for it."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def outcomes(
    inputs: Iterable[Input], serve: Callable[[Any, Path], None], folder: Path, limit_s: float
) -> Iterator[tuple[Input, Outcome]]:
    """The outcome of each input, from one child process until a crash or a hang, then from a new one."""
    child = None
    try:
        for given in inputs:
            child = child or Child(serve, folder, limit_s)
            child.pipe.send(given)
            outcome = child.outcome(given.format)
            yield given, outcome
            if outcome.kind in ("crash", "hang"):
                child.close()
                child = None
    finally:
        if child is not None:
            child.close()


def write_valid(folder: Path) -> Path:
    """Write one valid file of each format."""
    import feedline

    folder.mkdir()
    for name, (suffix, write) in FILES.items():
        write(folder / f"{name}{suffix}")
        if " index" in name:
            feedline.open_source(folder / f"{name}{suffix}").close()  # makes the index
    return folder


def inputs_of(kinds: Sequence[str], count: int, seed: int) -> Iterator[Input]:
    """At most `count` inputs of each kind. The next 20 are of the kind that has taken the least time so far.

    So a run that ends early has spent equal time on every kind, and read many more inputs of those that are fast.
    """
    spent_s = dict.fromkeys(kinds, 0.0)
    tried = dict.fromkeys(kinds, 0)
    while spent_s:
        kind = min(spent_s, key=spent_s.__getitem__)
        for number in range(tried[kind], min(tried[kind] + _AT_ONCE, count)):
            began = time.monotonic()
            yield Input(kind, number, seed)
            spent_s[kind] += time.monotonic() - began
        tried[kind] += _AT_ONCE
        if tried[kind] >= count:
            del spent_s[kind]


def record(path: Path, counts: Mapping[str, collections.Counter[str]]) -> None:
    """Add counts to those in a file."""
    kinds = {kind: collections.Counter(found) for kind, found in counts.items()}
    if path.exists():
        for kind, found in json.loads(path.read_text())["kinds"].items():
            kinds.setdefault(kind, collections.Counter()).update(found)
    result = {
        "inputs": sum(found.total() for found in kinds.values()),
        "kinds": {kind: dict(sorted(kinds[kind].items())) for kind in sorted(kinds)},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="of each format and state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which it ends, with fewer inputs")
    parser.add_argument("--record", type=Path, help="a JSON file, to whose counts those of this run are added")
    parser.add_argument("--format", action="append", choices=FORMATS, help="one of them; may be repeated")
    parser.add_argument("--only", type=int, help="the number of one input, to run it again")
    parser.add_argument("--folder", type=Path, default=Path("fuzz"), help="for inputs that refute")
    parser.add_argument("--limit-s", type=float, default=30.0, help="of an input: longer is a hang")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the children
    kinds = options.format or FORMATS
    inputs = inputs_of(kinds, options.inputs, options.seed)
    if options.only is not None:
        inputs = iter([Input(kind, options.only, options.seed) for kind in kinds])
    ends = time.monotonic() + 60 * options.minutes
    timely = itertools.takewhile(lambda _: time.monotonic() < ends, inputs)
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # the counts so far are recorded
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
            valid = write_valid(Path(work) / "valid")
            for given, outcome in outcomes(timely, serve, Path(work) / "child", options.limit_s):
                counts[given.format][outcome.kind] += 1
                if refutes(given.format, outcome.kind):
                    options.folder.mkdir(parents=True, exist_ok=True)
                    name = f"{given.format.replace(' ', '-')}-{given.seed}-{given.number}"
                    (options.folder / f"{name}.txt").write_text(f"{outcome.kind}\n{outcome.detail}\n")
                    if given.format in FILES and not list(options.folder.glob(f"{name}.[!t]*")):
                        given.write(options.folder, valid)
                    print(f"refuted: {name}: {outcome.kind}: {outcome.detail:.300}", file=sys.stderr)
                elif options.only is not None:
                    print(f"{outcome.kind}: {outcome.detail}")
    finally:
        if options.record:
            record(options.record, counts)
    for name, found in counts.items():
        shown = ", ".join(f"{kind} {found[kind]}" for kind in sorted(found))
        print(f"{name}: {found.total()} inputs: {shown}")
    refuting = sum(count for name in counts for kind, count in counts[name].items() if refutes(name, kind))
    if refuting:
        raise SystemExit(f"refuted by {refuting} inputs, saved in {options.folder}")
    print(f"{sum(found.total() for found in counts.values())} inputs: none refutes")


if __name__ == "__main__":
    main()
