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
    python tests/fuzz/fuzz.py --inputs 1000000 --minutes 60 --seed 1 --record benchmarks/results/fuzz.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fuzz_calls import CALLS
from fuzz_checks import RestoredFeed, mutate, outcome_of, remove
from fuzz_inputs import FILES, FORMATS, STATES
from fuzz_outcome import Outcome

EXPECTED = ("right", "other rows", "refused", "refused by the next batch", "accepted")
"""Outcomes that refute nothing; any other one does."""
OF_A_LIBRARY = {
    (name, kind)
    for name in ("hdf5 text", "remote hdf5 text", "lmdb", "remote lmdb")
    for kind in ("crash", "hang", "too much memory")
}
"""Outcomes of damage that a library reads by itself: docs/security.md says so."""
_HANG_OF_A_LIBRARY_S = 5.0
SLOW = ("remote ", "zarr", "folder", "dataset", "tar index")
_ROUND = 100
_SENT_AT_ONCE = 64
"""Inputs that a child has in its pipe, so that it does not wait for the parent."""
MEMORY_BYTES = 12 << 30
"""The memory limit of a child, so that an allocation that is too large fails."""
MOST_KIB = 1 << 20
"""How much the memory of a child may grow by one input: what a header promises must not be allocated."""


def refutes(name: str, outcome: str) -> bool:
    """Whether an outcome of an input of this format must not be."""
    return outcome not in EXPECTED and (name, outcome) not in OF_A_LIBRARY


class Input(NamedTuple):
    """One input, a function of its seed."""

    format: str
    number: int
    seed: int

    @property
    def chance(self) -> random.Random:
        """The random generator of its mutations."""
        return random.Random(f"{self.seed} {self.format} {self.number}")

    @property
    def name(self) -> str:
        """The name of its file, without a suffix."""
        return f"{self.format.replace(' ', '-')}-{self.seed}-{self.number}"


# --- in a child process ---


def serve(folder: Path) -> None:
    """Read inputs from standard input, one JSON line each, and print the outcome of each."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    calls = {**CALLS, **{kind: RestoredFeed(kind).resumed for kind in STATES}}
    print("ready", flush=True)
    for line in sys.stdin:
        given = Input(*json.loads(line))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory_kib("VmRSS")
        call = calls.get(given.format)
        outcome = of_file(given, folder) if call is None else call(given.chance)
        grown = memory_kib("VmHWM") - before
        if grown > MOST_KIB:
            outcome = Outcome("too much memory", f"{grown >> 10} MiB; {outcome}")
        print(json.dumps(outcome), flush=True)


def memory_kib(name: str) -> int:
    """Of this process: VmRSS, its memory, or VmHWM, the most since that was reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split(maxsplit=1)[0])


def of_file(given: Input, folder: Path) -> Outcome:
    """The outcome of a damaged file."""
    path = folder / f"{given.name}{FILES[given.format][0]}"
    valid = folder / "valid" / f"{given.format}{path.suffix}"
    mutate(given.format, path, valid, given.chance)
    outcome = outcome_of(given.format, path, given.chance)
    remove(path)
    return outcome


# --- in the parent ---


class Child:
    """A child process that takes one input at a time. Detects its death at once, and a hang after `limit_s`.

    One thread uses and closes it. A second thread reads the child's output, and ends when the child exits.
    """

    def __init__(self, command: list[str | Path], folder: Path, limit_s: float) -> None:
        self._limit_s = limit_s
        self._errors = (folder / "stderr.txt").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        started = self._lines.get(timeout=120)
        if started != "ready\n":
            raise SystemExit(f"a child process did not start: {self._stderr()}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:]

    def send(self, inputs: Iterable[Input]) -> None:
        """Give it inputs, of which it takes one after the other."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next outcome is a crash
            self._process.stdin.write("".join(json.dumps(given) + "\n" for given in inputs))
            self._process.stdin.flush()

    def outcome(self, kind: str) -> Outcome:
        """The outcome of the next input, of this kind. After a crash or a hang the child cannot be used again."""
        limit_s = min(self._limit_s, _HANG_OF_A_LIBRARY_S) if (kind, "hang") in OF_A_LIBRARY else self._limit_s
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return Outcome("hang", f"longer than {limit_s:g} s")
        if line:
            return Outcome(*json.loads(line))
        return Outcome("crash", f"exit code {self._process.wait()}: {self._stderr()}")

    def close(self) -> None:
        """Kill the child, and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._reader.join()
        self._errors.close()


def outcomes(
    inputs: Iterable[Input], command: list[str | Path], folder: Path, limit_s: float
) -> Iterator[tuple[Input, Outcome]]:
    """The outcome of each input, in child processes that run `command`."""
    child = None
    left = iter(inputs)
    waiting: collections.deque[Input] = collections.deque()
    try:
        while waiting := waiting or collections.deque(itertools.islice(left, _SENT_AT_ONCE)):
            child = child or Child(command, folder, limit_s)
            child.send(waiting)
            while waiting:
                given = waiting.popleft()
                outcome = child.outcome(given.format)
                yield given, outcome
                if outcome.kind in ("crash", "hang"):
                    child.close()
                    child = None
                    break
    finally:
        if child is not None:
            child.close()


def write_valid(folder: Path) -> None:
    """Write one valid file of each format."""
    (folder / "valid").mkdir()
    for name, (suffix, write) in FILES.items():
        path = folder / "valid" / f"{name}{suffix}"
        write(path)
        if " index" in name:
            import feedline

            feedline.open_source(path).close()  # makes the index


def save(given: Input, outcome: Outcome, work: Path, folder: Path) -> None:
    """Save an input that refutes, with its outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{given.name}.txt").write_text(f"{outcome.kind}\n{outcome.detail}\n")
    if given.format in FILES:
        suffix = FILES[given.format][0]
        path = folder / f"{given.name}{suffix}"
        if not path.exists():
            mutate(given.format, path, work / "valid" / f"{given.format}{suffix}", given.chance)


def inputs_of(kinds: Sequence[str], count: int, seed: int) -> Iterator[Input]:
    """So many inputs of each kind, in rounds, so that a run that is ended early has tried all of them.

    Of `SLOW` kinds a run of thousands tries a fifth.
    """
    for first in range(0, count, _ROUND):
        for kind in kinds:
            few = 5 if kind.startswith(SLOW) and count > _ROUND else 1
            for number in range(first, min(first + _ROUND, count), few):
                yield Input(kind, number, seed)


def record(path: Path, counts: Mapping[str, collections.Counter[str]]) -> None:
    """Add counts to those in a file."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    if path.exists():
        for kind, found in json.loads(path.read_text())["kinds"].items():
            kinds[kind].update(found)
    for kind, found in counts.items():
        kinds[kind].update(found)
    result = {
        "inputs": sum(found.total() for found in kinds.values()),
        "kinds": {kind: dict(sorted(kinds[kind].items())) for kind in sorted(kinds)},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="of each format and state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="after which it ends, with fewer inputs")
    parser.add_argument("--record", type=Path, help="a JSON file, to whose counts those of this run are added")
    parser.add_argument("--format", action="append", choices=FORMATS, help="one of them; may be repeated")
    parser.add_argument("--only", type=int, help="the number of one input, to run it again")
    parser.add_argument("--folder", type=Path, default=Path("fuzz"), help="for inputs that refute")
    parser.add_argument("--limit-s", type=float, default=30.0, help="of an input: longer is a hang")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.child)
        return
    kinds = options.format or FORMATS
    inputs = inputs_of(kinds, options.inputs, options.seed)
    if options.only is not None:
        inputs = iter([Input(kind, options.only, options.seed) for kind in kinds])
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # the counts so far are recorded
    try:
        with tempfile.TemporaryDirectory() as work:
            write_valid(Path(work))
            command: list[str | Path] = [sys.executable, __file__, "--child", work]
            for given, outcome in outcomes(inputs, command, Path(work), options.limit_s):
                counts[given.format][outcome.kind] += 1
                if refutes(given.format, outcome.kind):
                    save(given, outcome, Path(work), options.folder)
                    print(f"refuted: {given.name}: {outcome.kind}: {outcome.detail:.300}", file=sys.stderr)
                elif options.only is not None:
                    print(f"{outcome.kind}: {outcome.detail}")
                if options.minutes and time.monotonic() > began + 60 * options.minutes:
                    break
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
