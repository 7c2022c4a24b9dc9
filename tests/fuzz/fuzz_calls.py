"""Parsers of texts that are no files, for `fuzz.py`: variables of launchers, addresses, greetings of processes."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz_inputs import Outcome

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "rack[2,4-5]-node[007-015],login", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "CUDA_VISIBLE_DEVICES": "0,1",
    },
    {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "prterun-node1-4711@1",
        "OMPI_MCA_orte_hnp_uri": "2074279936.0;tcp://10.0.0.1,10.1.0.1:36691", "CUDA_VISIBLE_DEVICES": "0,1",
    },
    {"FEEDLINE_COORDINATOR": "a:1234", "FEEDLINE_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
    {"JAX_COORDINATOR_ADDRESS": "[fd00::2]:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
)  # fmt: skip
ADDRESSES = ("s3://corpus/train/**/x-[0-9].npy", "gs://bucket/a*?.parquet", "https://host:80/path/x.tfrecord")
_PIECES = (
    "0", "-1", "999999999", "9" * 18, "9" * 5000, "1.5", "x", "", " ", "[", "]", "(x", ")", ",", ":", "/", "..",
    "\0", "é", "٣", "²", "*", "?", "[!", "[z-a]", "**/", "\\", "//", "@", "#", "%00", "(x999999999)", "[" * 3000,
)  # fmt: skip


def text(found: str, chance: random.Random) -> str:
    """The text with one to three pieces replaced, inserted or cut."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        start = chance.randrange(len(found) + 1)
        stop = min(len(found), start + chance.choice((0, 0, 1, 3, 100)))
        piece = chance.choice((chance.choice(_PIECES), chr(chance.randrange(1, 0x250))))
        found = found[:start] + piece + found[stop:]
    return found


def variables(chance: random.Random) -> Outcome:
    """What the environment says about this process: a `ProcessInfo` or a ValueError."""
    from feedline._src.cluster.detect import find

    environ = dict(chance.choice(ENVIRONMENTS))
    for name in chance.sample(sorted(environ), chance.choice((1, 1, 2))):
        if chance.random() < 0.2:
            del environ[name]
        else:
            environ[name] = text(environ[name], chance)
    return _outcome(lambda: str(find(environ)), f"{environ}")


def address(chance: random.Random) -> Outcome:
    """The address of an object or a glob: parts without "..", or a ValueError."""
    from feedline._src.files.folder import is_match
    from feedline._src.files.store import Url

    url = text(chance.choice(ADDRESSES), chance)

    def parsed() -> str:
        found = Url.parse(url)
        if ".." in found.key.split("/"):
            raise AssertionError("a key leads out of its bucket")
        return str(is_match(["train", "x.npy"], found.key.split("/")))

    return _outcome(parsed, url)


def greeting(chance: random.Random) -> Outcome:
    """What a program sends to the coordinator's port before all processes have met: an index, or nothing."""
    from feedline._src.cluster.launchers.launcher import ProcessInfo
    from feedline._src.cluster.rendezvous import process_in

    sent = text("4 2", chance).encode()
    info = ProcessInfo("Slurm", "x", "node1:61500", 4, 0)

    def index() -> str:
        found = process_in(sent, info)
        if found is not None and not 0 < found < 4:
            raise AssertionError(f"no process has index {found}")
        return str(found)

    return _outcome(index, repr(sent))


def _outcome(parse: Callable[[], str], given: str) -> Outcome:
    try:
        found = parse()
    except (ValueError, TypeError) as error:
        refused = len(str(error)) <= 20_000
        return Outcome("refused" if refused else "an error of more than 20000 characters", f"{error}")
    except Exception as error:  # noqa: BLE001  # of any type: the outcome contains it
        return Outcome("an error of another type", f"{type(error).__name__}: {error}: {given[:500]}")
    return Outcome("accepted" if len(found) < 100_000 else "a result that is too long", found[:200])


CALLS: dict[str, Callable[[random.Random], Outcome]] = {
    "variables": variables,
    "address": address,
    "greeting": greeting,
}
