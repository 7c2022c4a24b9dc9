"""The peers benchmark: it runs, reports entrants that fail or deliver wrong rows, and computes ratios."""

import importlib.util
import json
import sys
import types

import jax
import numpy as np
import programs
import pytest
from peers.entrant import READERS, CannotRun, Entrant
from peers.peers import compete, options_of, random_bytes
from shared.rounds import paired

QUICK = ["--quick", "--environments", "none", "--row-bytes", "256"]
CONSUMER = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps({"pid": os.getpid(), "got": json.loads(line)}), flush=True)
    if "last" in line:
        sys.exit("the disk is full")
    if "deaf" in line:
        import time; time.sleep(60)
"""


def state_of(pid):
    """The kernel's letter for a process: R running, S sleeping, T stopped, Z ended."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_the_harness_runs_in_this_interpreter(tmp_path):
    saved = tmp_path / "peers.json"
    options = [*QUICK, "--only", "limit", "gather", "numpy", "feedline", "litdata"]
    command = [sys.executable, READERS.with_name("peers.py"), *options, "--work", tmp_path, "--out", saved]
    ran = programs.run(command, capture_output=True, text=True, timeout=120)
    result = json.loads(saved.read_text())
    assert ran.returncode == 1  # because litdata is not installed
    assert list(result["failures"]) == ["litdata"]
    assert "ModuleNotFoundError: " in result["failures"]["litdata"]
    assert ran.stdout.count("CANNOT BE MEASURED") == 1
    assert {told["entrant"]: told["right"] for told in result["checks"]} == dict.fromkeys(
        ["limit", "gather", "numpy", "feedline"], True
    )
    assert all(0.8 < told["jump"] < 1.2 for told in result["checks"])
    assert len(result["samples"]) == 2 * 4
    found = result["standings"]["256"]["entrants"]
    assert found["feedline"]["of_limit"]["rounds"] == found["feedline"]["of_gather"]["rounds"] == 2
    assert "jaxlib" in result["entrants"]["feedline"]["versions"]


# --- the rows ---


@pytest.fixture(scope="module")
def consume():
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "path", [*sys.path])  # the module appends to it
    spec = importlib.util.spec_from_file_location("consume", READERS.with_name("consume.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["consume"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["consume"]
    monkeypatch.undo()


def rows(consume, file):
    """A task with batches of 64 rows of 16 bytes."""
    return consume.Rows(batch_rows=64, threads=2, folder="", file=str(file), row_bytes=16)


def reader(spoil):
    """A reader of whole epochs in a random order. `spoil` makes its batches."""

    def batches(task):
        rows = task.load()
        for order in task.orders():
            yield from spoil(rows, order.reshape(-1, task.batch_rows))

    return types.SimpleNamespace(batches=batches)


def whole(rows, indices):
    return (rows[index] for index in indices)


def losing(rows, indices):
    return (rows[index] for index in indices[1:])


def repeating(rows, indices):
    indices[1, 5] = indices[0, 3]
    return whole(rows, indices)


def damaging(rows, indices):
    for k, index in enumerate(indices):
        batch = rows[index]
        batch[7, -1] ^= k == 1
        yield batch


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (whole, {"rows": 1024, "wrong": 0, "repeated": 0, "missing": 0}),
        (losing, {"rows": 960, "wrong": 0, "repeated": 0, "missing": 64}),
        (repeating, {"rows": 1024, "wrong": 0, "repeated": 1, "missing": 1}),
        (damaging, {"rows": 1024, "wrong": 1, "repeated": 0, "missing": 0}),
    ],
)
def test_rows_that_are_not_right_are_counted(consume, tmp_path, spoil, expected):
    task = rows(consume, random_bytes(tmp_path, 16 * 1024 + 40))
    found = consume.check(reader(spoil), task, None)
    assert {key: found[key] for key in expected} == expected
    assert 0.9 < found["jump"] < 1.1


def test_a_batch_must_lie_on_the_mesh(consume, tmp_path):
    task = rows(consume, random_bytes(tmp_path, 16 * 1024))
    on_one = reader(lambda rows, indices: (jax.device_put(rows[index], jax.devices()[0]) for index in indices))
    with pytest.raises(ValueError, match="must lie on all devices"):
        consume.measure(on_one, task, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"must be uint8\[64, 16\], got uint8\(32, 16\)"):
        consume.measure(reader(lambda rows, indices: iter([rows[:32]])), task, 0.0, 0.0)


# --- processes ---


@pytest.fixture
def peer(tmp_path):
    consumer = tmp_path / "consumer.py"
    consumer.write_text(CONSUMER)
    peer = Entrant("limit", sys.executable, tmp_path, consumer)
    yield peer
    peer.close()


def test_a_peer_is_stopped_between_its_rounds(peer):
    pids = {peer.ask(do)["pid"] for do in ("a", "b")}
    (pid,) = pids
    assert state_of(pid) == "T"
    peer.close()
    peer.close()
    with pytest.raises(FileNotFoundError):
        state_of(pid)


def test_a_peer_that_hangs_is_killed(peer):
    peer.ask("deaf")
    with pytest.raises(CannotRun, match=r"it gave no answer in 0\.2 s"):
        peer.ask("again", limit_s=0.2)


# --- a contest ---


def test_an_entrant_that_fails_in_a_round_leaves_the_others(tmp_path, monkeypatch, capsys):
    class Fake:
        def __init__(self, name, *_):
            self.name, self.rounds, self.close = name, 0, lambda: None

        def check(self, *_):
            return {"right": self.name != "numpy", "jump": 0.1 if self.name == "feedline" else 1.0}

        def ask(self, do):
            return {}

        def measure(self, *_):
            self.rounds += 1
            if self.name == "limit" and self.rounds == 2:
                raise CannotRun("the disk is full")
            return {"rows_per_s": 1e6}

    monkeypatch.setattr("peers.contest.Entrant", Fake)
    options = ["--gib", "0.1", "--rounds", "3", "--row-bytes", "256", "--work", str(tmp_path)]
    result = compete(options_of([*options, "--only", "limit", "numpy", "feedline"]))
    assert [sample["entrant"] for sample in result["samples"]] == [
        "limit", "feedline", "numpy", "numpy", "feedline", "feedline", "numpy",
    ]  # fmt: skip
    assert result["failures"] == {"limit": "the disk is full"}
    told = capsys.readouterr().out
    assert "numpy                WRONG ROWS" in told
    assert told.count("shuffles nearby rows only") == 1
    assert "limit                not measured: the disk is full" in told


# --- ratios ---


def test_ratios_are_taken_round_by_round():
    rng = np.random.default_rng(1)
    drift = np.exp(rng.normal(0, 1, 200))  # of the machine, the same for both
    over = dict(enumerate(3 * drift * np.exp(rng.normal(0, 0.1, 200))))
    found = paired(over, dict(enumerate(drift)))
    assert found["low"] < 3 < found["high"]
    # the standard error of a mean of 200 logarithms with deviation 0.1
    assert found["high"] / found["low"] == pytest.approx(np.exp(2 * 1.96 * 0.1 / np.sqrt(200)), rel=0.01)
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({0: 4.0, 1: 1.0}, {0: 2.0, 2: 1.0})["rounds"] == 1
