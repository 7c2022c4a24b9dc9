"""Checkpoints: a resumed run takes the steps of an uninterrupted one; mismatched checkpoints are refused."""

import errno
import fcntl
import gc
import json
import logging
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import programs
import pytest
from limits import limited
from mlp_tasks import made_up_rows, program_of, sharding_of, task_of

import feedline
from feedline._src.trainer import checkpoints as module
from feedline._src.trainer.checkpoints import Checkpoints
from feedline._src.trainer.model import Sizes

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of abandoned reads
ROWS = made_up_rows(200)
ORDER = feedline.Order(seed=3)
WIDE = Sizes(features=64, classes=10, width=512)  # 3.6 MB of state: writing takes longer than a step
SMALL = Sizes(features=64, classes=10, width=16)


@pytest.fixture
def quiet():
    """Silences Orbax, which logs the traceback of each failure that a test causes."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("absl").setLevel(logging.NOTSET)
    gc.collect()  # frees reads that Orbax abandoned


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    run(3, folder, every=1)
    return folder


@pytest.fixture
def copied(three, tmp_path, quiet):
    """A copy of `three`, to be damaged."""
    return Path(shutil.copytree(three, tmp_path / "copy"))


def restore(folder, start=None, rows=ROWS, order=ORDER, batch_size=64):
    """The trainer's state and the feed's, restored from the newest checkpoint."""
    sharding = sharding_of("jit_multi")
    with feedline.Feed(rows, batch_size, sharding, order=order) as feed:
        with Checkpoints(folder, feed, sharding.mesh) as checkpoints:
            try:
                state = checkpoints.restore(start or program_of("jit_multi", SMALL).start)
            except BaseException:
                assert feed.get_state()["step"] == 0
                raise
        return state, feed.get_state()


def run(steps, folder, every=3, sizes=SMALL, seen=None, rows=ROWS, order=ORDER):
    """Take up to `steps` steps from where the checkpoints in `folder` end."""
    program = program_of("jit_multi", sizes)
    with (
        feedline.Feed(rows, 64, sharding_of("jit_multi"), order=order) as feed,
        Checkpoints(folder, feed, program.mesh) as checkpoints,
    ):
        state = checkpoints.restore(program.start)
        fresh = [leaf.sharding for leaf in jax.tree.leaves(program.start())]
        assert [leaf.sharding for leaf in jax.tree.leaves(state)] == fresh
        while feed.get_state()["step"] < steps:
            state, _ = program.step(state, next(feed))
            if state.step % every == 0:
                checkpoints.save(state)
            if seen is not None:
                seen.append(values(state))


def values(state):
    return [np.array(jax.device_get(leaf)) for leaf in jax.tree.leaves(state)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.slow
def test_a_checkpoint_holds_its_step_though_the_next_steps_overwrote_it(tmp_path):
    seen = []
    half = tmp_path / "12.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp"
    half.mkdir(parents=True)  # incomplete, so it is removed
    run(13, tmp_path, sizes=WIDE, seen=seen)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"6", "9", "12"}  # the newest three
    for step in (12, 9, 6):
        state, feed = restore(tmp_path, program_of("jit_multi", WIDE).start)
        assert_same_bits(values(state), seen[step - 1])
        assert feed["step"] == step
        shutil.rmtree(tmp_path / str(step))


def test_the_batch_size_may_change(three):
    feed = restore(three, batch_size=32)[1]
    assert (feed["step"], feed["epoch"], feed["position"]) == (3, 0, 192)


@pytest.mark.slow
def test_a_step_is_saved_once_and_only_with_the_feed_beside_it(tmp_path):
    program = program_of("jit_multi", SMALL)
    with (
        feedline.Feed(ROWS, 64, sharding_of("jit_multi"), order=ORDER) as feed,
        Checkpoints(tmp_path, feed, program.mesh) as checkpoints,
    ):
        state = program.start()
        for _ in range(2):
            state, _ = program.step(state, next(feed))
            checkpoints.save(state)
            checkpoints.save(state)
        next(feed)
        with pytest.raises(ValueError, match="trainer has done 2 and the feed has delivered 3; begin with a new"):
            checkpoints.save(state)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["1", "2"]


@pytest.mark.parametrize(
    ("sizes", "optimizer", "told"),
    [
        (Sizes(64, 10, width=8), None, r"params\.hidden\.0\.bias is float32\[16\], this run's is float32\[8\]"),
        (Sizes(64, 10, 3, 16), None, r"params\.hidden\.2\.bias is missing, this run's is float32\[16\]"),
        (SMALL, optax.sgd(1e-3), r"optimizer\.0\.count is int32\[\], this run's is missing"),
    ],
)
def test_another_model_is_refused(sizes, optimizer, told, three):
    with pytest.raises(ValueError, match=rf"checkpoint .*/3 was made with another model: its .*{told}"):
        restore(three, task_of(sizes, optimizer).start)


def test_other_data_is_refused(three):
    with pytest.raises(ValueError, match=r"made with other data: its 'data' is '\w+', this feed's is .* Give the"):
        restore(three, rows=made_up_rows(200, seed=1))
    with pytest.raises(ValueError, match=r"its 'order' is {'seed': 3, 'shuffle': True}, this feed's is {'se"):
        restore(three, order=feedline.Order(seed=4))


@pytest.mark.parametrize("items", [[], ["default"], ["feed", "state"]])
def test_a_checkpoint_that_something_else_wrote_is_refused(items, tmp_path, quiet):
    if items:
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(7, args=ocp.args.Composite(**{name: ocp.args.JsonSave({"step": 7}) for name in items}))
    else:
        (tmp_path / "7").mkdir()
    holds = ", ".join(items) or "nothing"
    with pytest.raises(ValueError, match=f"/7 holds {holds}: a part was removed, or something else wrote it"):
        restore(tmp_path)


# --- the directory ---


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(OSError, match=f"that can be written to, and {tmp_path}/{name} is not one .*; choose"):
            restore(tmp_path / name)


def test_a_mesh_without_all_processes_of_the_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match=r"all 3 processes .* devices of process 0 only; start"):
        restore(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from feedline._src.trainer.checkpoints import _lock
with _lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_is_refused_while_another_run_uses_it(tmp_path):
    half = tmp_path / "12.orbax-checkpoint-tmp"  # what the other run is writing is not removed
    half.mkdir()
    with programs.started(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        told = rf"to one run at a time, .*: process {other.pid} on {socket.gethostname()}, since 2.*; wait for its"
        for _ in range(2):
            with pytest.raises(feedline.FeedError, match=told):
                restore(tmp_path)
        assert half.exists()
        other.kill()
        other.wait()
        for _ in range(2):
            restore(tmp_path)


def test_a_directory_is_free_again_while_a_forked_process_has_its_lock_open(tmp_path, monkeypatch):
    flock, opened = fcntl.flock, []

    def shared(file, how):
        flock(file, how)
        opened.append(os.dup(file.fileno()))  # as in a process that was forked

    monkeypatch.setattr(module.fcntl, "flock", shared)
    for _ in range(2):
        with module._lock(tmp_path):
            pass
    for descriptor in opened:
        os.close(descriptor)


def test_a_directory_on_a_full_disk_can_still_be_locked(tmp_path):
    with limited(resource.RLIMIT_FSIZE, 0), module._lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def refused(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", refused)
    with module._lock(tmp_path):
        pass
    assert f"{tmp_path} has no file locks (No locks available): give no other run this directory" in caplog.text


# --- damage ---


def test_a_full_disk_is_an_error_without_the_tracebacks_of_orbax(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    told = "a checkpoint could not be written: No space left on device. Newest complete checkpoint: none; make"
    with pytest.raises(feedline.FeedError, match=told):
        run(1, tmp_path, every=1)
    assert "Traceback" not in capfd.readouterr().err
    assert list(tmp_path.glob("[!.]*")) == []


def test_a_save_that_fails_does_not_hide_why_the_loop_ended(tmp_path, monkeypatch):
    def close(manager):
        raise ValueError("Failed to write 19991 bytes to file 8 [os_error_code='28']")

    monkeypatch.setattr(ocp.CheckpointManager, "close", close)
    program = program_of("jit_multi", SMALL)
    with (
        feedline.Feed(ROWS, 64, sharding_of("jit_multi")) as feed,
        pytest.raises(KeyboardInterrupt) as raised,
        Checkpoints(tmp_path, feed, program.mesh),
    ):
        raise KeyboardInterrupt
    assert "a checkpoint could not be written: No space left on device" in raised.value.__notes__[0]


@pytest.mark.parametrize("part", ["state", "feed", "checksums"])
def test_a_damaged_or_missing_part_is_named(part, copied):
    told = r"damaged, or cannot be read \((?s:.*); remove its folder to go on from step 2 \[.*/3\]$"
    for file in {"state": ["_METADATA", "manifest.ocdbt"]}.get(part, ["metadata"]):
        path = copied / "3" / part / file
        whole = path.read_bytes()
        path.write_bytes(whole[:20])
        with pytest.raises(feedline.FeedError, match=told):
            restore(copied)
        path.write_bytes(whole)
    shutil.rmtree(copied / "3" / part)
    left = ", ".join(sorted({"state", "feed", "checksums"} - {part}))
    with pytest.raises(ValueError, match=rf"/3 holds {left}: a part was removed, .* remove the folder to go on"):
        restore(copied)
    shutil.rmtree(copied / "3")
    assert restore(copied)[1]["step"] == 2


def test_another_place_of_the_feed_is_noticed(copied):
    path = copied / "3" / "feed" / "metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), "position": 128}))
    shutil.rmtree(copied / "2")
    shutil.rmtree(copied / "1")
    with pytest.raises(feedline.FeedError, match=r"\(feed is not as it was saved\); there is no older one"):
        restore(copied)


def test_another_place_of_a_lane_is_noticed(tmp_path, quiet):
    def lane(number, count):
        rows = grain.MapDataset.range(number, 200, count)
        return rows.map(lambda i: {name: leaf[i] for name, leaf in ROWS.items()}).to_iter_dataset()

    stream = {"rows": feedline.Lanes(lane, 4), "order": None}
    run(2, tmp_path, every=2, **stream)
    assert restore(tmp_path, **stream)[1]["lanes"]["1"] == {"next_index": 32}
    assert feedline.load_lanes(tmp_path / "2" / "feed")["lanes"]["1"] == {"next_index": 32}
    path = tmp_path / "2" / "feed" / "lane-00001-of-00004.json"
    path.write_text(path.read_text().replace('"next_index": 32', '"next_index": 33'))
    with pytest.raises(feedline.FeedError, match=r"lane-00001-of-00004\.json .* it is not as it was saved"):
        restore(tmp_path, **stream)


def test_a_resume_needs_memory_for_one_state(three, monkeypatch):
    def live(manager, *arguments, **options):
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        return usual(manager, *arguments, **options)

    held, usual = [], ocp.CheckpointManager.restore
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    monkeypatch.setattr(ocp.CheckpointManager, "restore", live)
    restore(three)
    assert held[0] <= before  # less, if a thread of an earlier test has dropped an array since


def test_a_flipped_bit_changes_no_weight(copied):
    chance, refused, unharmed = random.Random(5), 0, 0
    expected = values(restore(copied)[0])
    paths = sorted(path for path in (copied / "3").rglob("*") if path.is_file())
    data = [path for path in paths if path.parent.name == "d"]  # files of arrays
    for path in [*data, *chance.choices(paths, k=12)]:
        whole = path.read_bytes()
        at = chance.randrange(len(whole) * 8)
        path.write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ 1 << at % 8]) + whole[at // 8 + 1 :])
        try:
            assert_same_bits(values(restore(copied)[0]), expected)
        except (feedline.FeedError, ValueError) as error:
            refused += f"{copied}/3" in str(error)
        else:
            unharmed += 1
        path.write_bytes(whole)
    assert refused
    assert refused + unharmed == len(data) + 12
