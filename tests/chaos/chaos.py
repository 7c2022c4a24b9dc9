"""Does a job that is killed again and again lose a row, or read one twice?

Each round continues a job from its last commit, on 1, 2 or 4 processes, with another batch size and prefetch. The
source of a job is lanes, a mixture, records, a stream, arrays, rows of different lengths, a store, or files that
worker processes read. A round kills the whole job, one process or one worker with SIGKILL at a random moment. If
it kills a worker, feedline must replace the worker, and the round kills the job later. In each step, the job
gathers the ids of the global batch, and commits them in one line with the feed's state. For lanes, the line
instead names the folder to which all processes saved their lanes. The commits of all rounds must hold, row for
row, what an uninterrupted feed in this process delivers; for lanes, the items that Grain alone reads from each
lane, epoch after epoch. After each round, no process of the job may be left, and the job's folder may not grow.
Refuted by a single wrong row, and by a process or files that are left.

    python tests/chaos/chaos.py --folder chaos --rounds 200     # with the same folder again: continues
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 1003
LANES = 8
KINDS = ("lanes", "mixture", "records", "stream", "arrays", "ragged", "store", "workers")
FILES = range(803, ROWS)  # rows of the mixture that are files
TOPOLOGIES = ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2))  # processes, devices of each
BATCH_SIZES = (16, 24, 48, 64, 200)  # multiples of LANES
PREFETCHES = (1, 2, 5)
COMMITS = "commits.jsonl"
STARTED_S, ENDED_S = 600.0, 120.0  # limits: until a job commits; from the kill to the job's end
LEFT_S = 30.0  # how long after the end of the launcher the job's other processes may take
MORE_FILES = 64  # a job's folder may grow by so many files after its first round: two or three states of lanes
MARK = "FEEDLINE_CHAOS"  # the variable by which the processes of a round are recognised


def source_of(kind: str, folder: Path) -> Any:
    """Rows {"id": i, "x": 7·i + 3}, as a source of the given kind. `folder`: see `write` and `served`."""
    import jax

    import feedline

    if kind == "lanes":
        return feedline.Lanes(make_lane, LANES)
    if kind == "mixture":
        integer = jax.ShapeDtypeStruct((), np.int32)
        files = feedline.decoded(folder / "files", decode, {"id": integer, "x": integer})
        sources = {"arrays": columns(range(600)), "records": records(range(600, FILES.start)), "files": files}
        return feedline.Mixture(sources, {"arrays": 5, "records": 3, "files": 2})
    if kind == "arrays":
        return columns(range(ROWS))
    if kind == "workers":
        return {name: folder / f"{name}.npy" for name in ("id", "x")}
    if kind == "ragged":  # row i has i % 30 values; the feed pads it with zeros
        rows = columns(range(ROWS))
        lengths = rows["id"] % 30
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return feedline.Ragged({"id": rows["id"], "x": (np.repeat(rows["x"], lengths), offsets)}, (24, 27, 30))
    if kind == "store":
        return feedline.open_source((folder / "address").read_text(), store=feedline.Store(cache=folder / "cache"))
    if kind == "records":
        return records(range(ROWS))
    return records(range(ROWS)).shuffle(seed=5).to_iter_dataset().filter(lambda found: bool(found["id"] % 3))


def columns(ids: range) -> dict[str, Any]:
    found = np.arange(ids.start, ids.stop, dtype=np.int32)
    return {"id": found, "x": 7 * found + 3}


def records(ids: range) -> Any:
    import grain

    return grain.MapDataset.range(ids.start, ids.stop).map(lambda i: {"id": np.int32(i), "x": np.int32(7 * i + 3)})


def decode(record: bytes, out: Any, row: Any) -> None:
    out["id"][...] = int(record)
    out["x"][...] = 7 * int(record) + 3


def write(folder: Path) -> None:
    """Write the files that some sources read."""
    for name, column in columns(range(ROWS)).items():
        np.save(folder / f"{name}.npy", column)
    (folder / "files").mkdir(exist_ok=True)
    for i in FILES:
        (folder / "files" / f"{i:04d}").write_text(str(i))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[None]:
    """Serves a store with the rows in one structured `.npy`, and writes its address to a file in `folder`."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from store_server import serving

    rows = np.zeros(ROWS, [("id", np.int32), ("x", np.int32)])
    for name, column in columns(range(ROWS)).items():
        rows[name] = column
    np.save(file := io.BytesIO(), rows)
    with serving({"/rows.npy": file.getvalue()}) as store:
        (folder / "address").write_text(f"{store.url}/rows.npy")
        yield


def make_lane(lane: int, count: int) -> Any:
    """Every count-th record, shuffled. A lane keeps a third, two thirds or all of them, so lengths differ."""
    import grain

    own = records(range(ROWS))[lane::count].shuffle(seed=lane).to_iter_dataset(grain.ReadOptions(1, 4))
    kept = own.filter(lambda found: bool(found["id"] % 3 <= lane % 3))
    return grain.experimental.WindowShuffleIterDataset(kept, window_size=64, seed=lane)


def feed_of(kind: str, folder: Path, batch_size: int, prefetch: int = 2, workers: int = 0) -> Any:
    """An endless feed on all devices. Whatever the batch size, it leaves out no row of an epoch."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import feedline

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    remainder = "pad" if kind == "lanes" else "wrap"
    reading = feedline.Reading(workers=workers, restart=100)
    source = source_of(kind, folder)
    return feedline.Feed(source, batch_size, sharding, remainder=remainder, prefetch=prefetch, reading=reading)


def work(kind: str, folder: Path, batch_size: int, prefetch: int) -> None:
    """The job: continues from the last commit, until it is killed."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import feedline

    feedline.cluster.initialize()
    feed = feed_of(kind, folder, batch_size, prefetch, workers=2 if kind == "workers" else 0)
    everywhere = NamedSharding(feed.spec["id"].sharding.mesh, PartitionSpec())

    @jax.jit
    def step(batch: Any) -> Any:
        ids = jnp.where(batch.get("valid", True), batch["id"], -1)
        x = 7 * batch["id"] + 3
        if "x_length" in batch:
            x = jnp.where(jnp.arange(batch["x"].shape[1]) < batch["x_length"][:, None], x[:, None], 0)
        return jax.lax.with_sharding_constraint(ids, everywhere), jnp.all(batch["x"] == x)

    committed = whole_lines(folder / COMMITS)
    if committed:
        state = json.loads(committed[-1])["state"]
        feed.set_state(feedline.load_lanes(folder / state) if kind == "lanes" else state)
    file = None
    if jax.process_index() == 0:  # a step needs all processes, so all have read the file before process 0 writes
        file = os.open(folder / COMMITS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for batch in feed:
        ids, right = step(batch)
        state = save_together(feed.get_state(), folder) if kind == "lanes" else feed.get_state()
        line = {"ids": np.asarray(ids).tolist(), "state": state}
        if not right:
            raise SystemExit("a batch holds leaves of different rows")
        if file is not None:
            os.write(file, f"{json.dumps(line)}\n".encode())


def save_together(state: dict[str, Any], folder: Path) -> str:
    """Save the lanes of all processes to one new folder, and return its name once the folder is complete."""
    import jax
    from jax.experimental import multihost_utils

    import feedline

    name = f"step-{state['step']}"
    feedline.save_lanes(state, folder / name)
    multihost_utils.sync_global_devices(name)
    if jax.process_index() == 0:  # the last commit names this step or the previous one
        shutil.rmtree(folder / f"step-{state['step'] - 2}", ignore_errors=True)
    return name


def whole_lines(path: Path) -> list[bytes]:
    """The complete lines of a file. An incomplete last line is removed from the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    return text[:whole].splitlines()


class Job:
    """The commits of one kind of source over all rounds, and the expected ones."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / kind
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / COMMITS).exists():  # a resumed feed refuses changed files
            write(self.folder)
        self._files: int | None = None  # after the first round
        self._expected = lanes_alone() if kind == "lanes" else uninterrupted(kind, self.folder)
        self._checked = 0
        self.rows = 0

    def check(self) -> int:
        """Compare the commits since the last check. Returns the number of all commits."""
        lines = whole_lines(self.folder / COMMITS)
        for number, line in enumerate(lines[self._checked :], start=self._checked):
            ids = json.loads(line)["ids"]
            expected = self._expected(len(ids))
            if ids != expected:
                raise SystemExit(f"refuted: commit {number} of {self.kind} holds {ids}, expected {expected}")
            self.rows += sum(id >= 0 for id in ids)
        self._checked = len(lines)
        return len(lines)

    def files(self) -> int:
        """The number of files in the job's folder, which may not grow."""
        found = sum(path.is_file() for path in self.folder.rglob("*"))
        self._files = self._files or found
        if found > self._files + MORE_FILES:
            raise SystemExit(f"refuted: {self.folder} had {self._files} files after a round, and now has {found}")
        return found

    def commits(self) -> int:
        """The number of commits so far, while the job writes."""
        path = self.folder / COMMITS
        return path.read_bytes().count(b"\n") if path.exists() else 0


def uninterrupted(kind: str, folder: Path) -> Callable[[int], list[int]]:
    """A function of n that returns the next n ids of an uninterrupted feed."""

    def ids() -> Iterator[int]:
        with feed_of(kind, folder, 1000) as feed:  # large batches, because a late kill leaves thousands of commits
            for batch in feed:
                yield from np.asarray(batch["id"]).tolist()

    remaining = ids()
    return lambda size: list(itertools.islice(remaining, size))


def lanes_alone() -> Callable[[int], list[int]]:
    """A function of n that returns the ids of the next batch of n rows, as Grain alone reads the lanes.

    A batch takes the same number of items from each lane; -1 where the lane has ended. An epoch ends with the last
    item of the longest lane.
    """
    lanes = [[int(row["id"]) for row in make_lane(lane, LANES)] for lane in range(LANES)]
    taken = 0  # items of each lane, in this epoch

    def batch(size: int) -> list[int]:
        nonlocal taken
        start, share = taken if taken < max(map(len, lanes)) else 0, size // LANES
        taken = start + share
        return [id for lane in lanes for id in [*lane[start:taken], *[-1] * share][:share]]

    return batch


def play_round(job: Job, chance: random.Random) -> dict[str, Any]:
    """One round: start the job, kill it, and check its commits."""
    processes, devices = chance.choice(TOPOLOGIES)
    batch_size = chance.choice([size for size in BATCH_SIZES if size % (processes * devices) == 0])
    prefetch = chance.choice(PREFETCHES)
    early = chance.random() < 0.2
    victim = chance.choice(["all", "one", "worker"] if job.kind == "workers" and not early else ["all", "one"])
    wanted, delay_s = chance.randrange(1, 60), chance.uniform(0, 4) if early else chance.uniform(0, 0.02)
    began, before = time.monotonic(), job.check()
    launch = ["launch", "--processes", str(processes), "--devices-per-process", str(devices), "--cpu"]
    own = [sys.executable, __file__, "--work", job.kind, str(job.folder), str(batch_size), str(prefetch)]
    command = [sys.executable, "-m", "feedline", *launch, "--grace-s", "0.5", "--", *own]
    mark = f"{job.kind} {os.getpid()} {before} {began}"
    with (job.folder / "output.log").open("w") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {MARK: mark}
        )
    try:
        if not early:
            await_commits(job, launcher, before + wanted)
        time.sleep(delay_s)
        if victim == "worker":
            os.kill(chance.choice(marked(mark, b"multiprocessing-fork")), signal.SIGKILL)
            await_commits(job, launcher, job.commits() + 20)  # more than was read ahead
        workers = chance.sample(found := workers_of(launcher.pid), len(found))
        for worker in workers if victim != "one" else workers[-1:]:
            with contextlib.suppress(ProcessLookupError):  # the launcher ended it, because another process died
                os.kill(worker, signal.SIGKILL)
        if not workers:
            launcher.kill()
        launcher.wait(ENDED_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"refuted: the job goes on {ENDED_S:g} s after it was killed: see {log.name}") from None
    finally:
        launcher.kill()
        launcher.wait()
    check_left(mark)
    return {
        "kind": job.kind,
        "processes": processes,
        "devices": processes * devices,
        "batch_size": batch_size,
        "prefetch": prefetch,
        "killed": f"{victim}, {'before it worked' if early else 'at work'}",
        "commits": job.check() - before,
        "files": job.files(),
        "seconds": round(time.monotonic() - began, 2),
    }


def await_commits(job: Job, launcher: subprocess.Popen[bytes], count: int) -> None:
    """Wait until the job has so many commits."""
    began = time.monotonic()
    while job.commits() < count:
        if launcher.poll() is not None or time.monotonic() - began > STARTED_S:
            raise SystemExit(f"refuted: the job ended by itself, or stands still: see {job.folder / 'output.log'}")
        time.sleep(0.001)


def marked(mark: str, word: bytes = b"") -> list[int]:
    """The living processes of a round with this word in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            own = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if own and not dead and word in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def check_left(mark: str) -> None:
    """Wait until the processes of a round have ended."""
    deadline = time.monotonic() + LEFT_S
    while left := marked(mark):
        if time.monotonic() > deadline:
            raise SystemExit(f"refuted: these processes are left of a round: {left}")
        time.sleep(0.05)


def workers_of(launcher: int) -> list[int]:
    """The job's processes. The launcher's other child is a guard, which ends them if the launcher dies."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if b"--work" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("chaos"), help="commits and rounds.jsonl")
    parser.add_argument("--rounds", type=int, default=200, help="in all, including those of earlier calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of sources, in turn")
    parser.add_argument("--afresh", action="store_true", help="delete the folder first")
    parser.add_argument("--work", nargs=4, metavar=("KIND", "FOLDER", "BATCH", "PREFETCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, folder, batch_size, prefetch = options.work
        work(kind, Path(folder), int(batch_size), int(prefetch))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.afresh:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "rounds.jsonl"
    rounds = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with contextlib.ExitStack() as stack:
        if "store" in options.kinds:
            (options.folder / "store").mkdir(exist_ok=True)
            stack.enter_context(served(options.folder / "store"))
        jobs = {kind: Job(kind, options.folder) for kind in options.kinds}
        for number in range(len(rounds), options.rounds):
            chance = random.Random(f"{options.seed} {number}")
            found = {"round": number, **play_round(jobs[options.kinds[number % len(jobs)]], chance)}
            rounds.append(found)
            with file.open("a") as output:
                output.write(f"{json.dumps(found)}\n")
            print(json.dumps(found), flush=True)
        for job in jobs.values():
            job.check()
    rows = {kind: job.rows for kind, job in jobs.items()}
    seconds = [found["seconds"] for found in rounds]
    print(
        f"{len(rounds)} rounds, {sum(found['commits'] for found in rounds)} commits, rows {rows}: "
        f"none lost, none repeated; a round took at most {max(seconds, default=0):.1f} s"
    )


if __name__ == "__main__":
    main()
