"""Checkpoints: a resumed run takes the steps of an uninterrupted one; mismatched checkpoints are refused."""

import gc
import logging
import os
import random
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import programs
import pytest
from mlp_oracle import made_up_rows
from mlp_tasks import program_of, sharding_of, task_of

import feedline
from feedline._src.trainer.checkpoints import Checkpoints
from feedline._src.trainer.model import Sizes

MODES = ["jit_single", "jit_multi", "pmap"]
NOBODY = 65534
ROWS = made_up_rows(200)
ORDER = feedline.Order(seed=3)
WIDE = Sizes(features=64, classes=10, width=512)  # 3.6 MB of state: writing takes longer than a step
SMALL = Sizes(features=64, classes=10, width=16)


@pytest.fixture
def quiet():
    """Orbax logs the tracebacks of what it is made to fail at."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("absl").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    run("jit_multi", 3, folder, every=1)
    return folder


def restore(folder, state=None, rows=ROWS, order=ORDER, batch_size=64):
    """The trainer's state and the feed's, restored from the newest checkpoint."""
    sharding = sharding_of("jit_multi")
    with feedline.Feed(rows, batch_size, sharding, order=order) as feed:
        with Checkpoints(folder, feed, sharding.mesh) as checkpoints:
            try:
                state = checkpoints.restore(state or program_of("jit_multi", SMALL).start())
            except BaseException:
                assert feed.get_state()["step"] == 0
                raise
        return state, feed.get_state()


def run(mode, steps, folder=None, every=3, sizes=SMALL, seen=None):
    """Losses of up to `steps` steps from where the checkpoints in `folder` end, and the last state."""
    program, losses = program_of(mode, sizes), []
    with feedline.Feed(ROWS, 64, sharding_of(mode), order=ORDER) as feed:
        if folder is None:
            return advance(program, program.start(), feed, steps, losses, lambda state, recent: None), losses
        with Checkpoints(folder, feed, program.mesh) as checkpoints:
            state = checkpoints.restore(program.start())

            def after_step(state, recent):
                if state.step % every == 0:
                    checkpoints.save_if_finite(int(state.step), state, recent)
                if seen is not None:
                    seen.append(values(state))

            left = steps - feed.get_state()["step"]
            return advance(program, state, feed, left, losses, after_step), losses


def advance(program, state, feed, steps, losses, after_step):
    recent = program.recent(1)
    for _, batch in zip(range(steps), feed, strict=False):
        state, recent = program.step(state, recent, batch)
        after_step(state, recent)
        losses.append(float(recent[0, 0]))
    return state


def values(state):
    return [np.array(jax.device_get(leaf)) for leaf in jax.tree.leaves(state)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_same_bits(mode, tmp_path):
    state, losses = run(mode, 12)
    begun = run(mode, 8, tmp_path)[1]  # saved after 3 and 6
    resumed, rest = run(mode, 12, tmp_path)
    assert begun == losses[:8]
    assert rest == losses[6:]
    assert_same_bits(values(resumed), values(state))
    assert int(resumed.step) == 12


@pytest.mark.slow
def test_a_checkpoint_holds_its_step_though_the_next_steps_overwrote_it(tmp_path):
    seen = []
    run("jit_multi", 9, tmp_path, sizes=WIDE, seen=seen)
    for step in (9, 6, 3):
        state, feed = restore(tmp_path, program_of("jit_multi", WIDE).start())
        assert_same_bits(values(state), seen[step - 1])
        assert feed["step"] == step
        shutil.rmtree(tmp_path / str(step))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [MODES[:2], MODES[1:], MODES[::-2]])
def test_a_mode_continues_from_another(before, after, tmp_path):
    losses = run(before, 10)[1]
    run(before, 6, tmp_path)
    program = program_of(after, SMALL)
    fresh = program.start()
    with (
        feedline.Feed(ROWS, 64, sharding_of(after), order=ORDER) as feed,
        Checkpoints(tmp_path, feed, program.mesh) as checkpoints,
    ):
        state = checkpoints.restore(fresh)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == [leaf.sharding for leaf in jax.tree.leaves(fresh)]
    np.testing.assert_allclose(run(after, 10, tmp_path)[1], losses[6:], rtol=1e-5)


@pytest.mark.slow
def test_the_batch_size_may_change(three):
    feed = restore(three, batch_size=32)[1]
    assert (feed["step"], feed["epoch"], feed["position"]) == (3, 0, 192)


@pytest.mark.slow
def test_the_newest_three_are_kept_and_incomplete_ones_are_removed(tmp_path):
    half = tmp_path / "12.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    run("jit_multi", 5, tmp_path, every=1)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["3", "4", "5"]


def test_a_step_is_saved_once(tmp_path):
    program = program_of("jit_multi", SMALL)
    with (
        feedline.Feed(ROWS, 64, sharding_of("jit_multi")) as feed,
        Checkpoints(tmp_path, feed, program.mesh) as checkpoints,
    ):
        state, recent = program.step(program.start(), program.recent(1), next(feed))
        checkpoints.save_if_finite(1, state, recent)
        checkpoints.save(state)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["1"]


def test_trainer_and_feed_at_different_steps_are_not_saved(tmp_path):
    program = program_of("jit_multi", SMALL)
    with (
        feedline.Feed(ROWS, 64, sharding_of("jit_multi")) as feed,
        Checkpoints(tmp_path, feed, program.mesh) as checkpoints,
    ):
        state, _ = program.step(program.start(), program.recent(1), next(feed))
        next(feed)
        with pytest.raises(
            ValueError, match="the trainer has done 1 and the feed has delivered 2; begin with a new"
        ):
            checkpoints.save(state)
    assert list(tmp_path.glob("[!.]*")) == []


@pytest.mark.parametrize(("trained", "delivered", "saved"), [(2, 3, 3), (3, 2, 3), (3, 3, 2)])
def test_a_checkpoint_of_different_steps_is_refused(tmp_path, trained, delivered, saved):
    program = program_of("jit_multi", SMALL)
    state = program.start()._replace(step=jax.device_put(np.int32(trained), program.start().step.sharding))
    with feedline.Feed(ROWS, 64, sharding_of("jit_multi"), order=ORDER) as feed:
        delivering = {**feed.get_state(), "step": delivered}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), feed=ocp.args.JsonSave(delivering))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(saved, args=items)
    told = f"is of step {saved}, its trainer had done {trained} and its feed had delivered {delivered}; remove"
    with pytest.raises(ValueError, match=told):
        restore(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "optimizer", "told"),
    [
        (
            Sizes(64, 10, width=8),
            None,
            r"params\.hidden\.0\.bias is float32\[16\], this run's is float32\[8\]",
        ),
        (
            Sizes(32, 10, width=16),
            None,
            r"hidden\.0\.kernel is float32\[64, 16\], this run's is float32\[32, 16\]",
        ),
        (Sizes(64, 10, 3, 16), None, r"params\.hidden\.2\.bias is missing, this run's is float32\[16\]"),
        (Sizes(64, 10, 1, 16), None, r"hidden\.1\.bias is float32\[16\], this run's is missing"),
        (SMALL, optax.sgd(1e-3), r"optimizer\.0\.count is int32\[\], this run's is missing"),
    ],
)
def test_another_model_is_refused(sizes, optimizer, told, three):
    with pytest.raises(ValueError, match=rf"checkpoint .*/3 is of another model: its .*{told}"):
        restore(three, jax.eval_shape(task_of(sizes, optimizer).start))


def test_other_data_is_refused(three):
    with pytest.raises(
        ValueError, match=r"/3 is of other data: its 'data' is '\w+', this feed's is '\w+'\. Give the data"
    ):
        restore(three, rows=made_up_rows(200, seed=1))
    with pytest.raises(
        ValueError, match=r"its 'order' is {'seed': 3, 'shuffle': True}, this feed's is {'seed': 4, "
    ):
        restore(three, order=feedline.Order(seed=4))


@pytest.mark.parametrize("items", [["default"], ["state"], ["feed"], ["feed", "state"]])
def test_a_checkpoint_that_something_else_wrote_is_refused(items, tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.Composite(**{name: ocp.args.JsonSave({"step": 7}) for name in items}))
    with pytest.raises(
        ValueError,
        match=f"/7 holds {', '.join(items)}: a part was removed, or something else wrote it; choose another",
    ):
        restore(tmp_path)


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(OSError, match=f"and {tmp_path}/file is a file; choose another directory$"):
            restore(tmp_path / name)


def test_a_directory_that_cannot_be_written_to_is_refused(monkeypatch):
    # the packages may lie where nobody else may look, such as below /root
    monkeypatch.setattr("feedline._src.pipeline.description.version", lambda package: "1")
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to others, whom root has to become here
        folder = Path(name)
        folder.chmod(0o555)
        user = os.geteuid()
        os.seteuid(user or NOBODY)
        try:
            for directory in (folder, folder / "new"):
                with pytest.raises(
                    OSError, match=rf"and {directory} cannot be written to \(Permission denied\); choose another"
                ):
                    restore(directory)
        finally:
            os.seteuid(user)


@pytest.mark.slow
def test_a_directory_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / ".hidden").touch()
    (tmp_path / "lost+found").mkdir()  # the root of a volume
    restore(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "pictures").mkdir()
    with pytest.raises(
        ValueError, match=f"and {tmp_path} holds notes.txt and 1 more but no checkpoint; choose a "
    ):
        restore(tmp_path)
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()  # of a run that was killed in its first save
    assert restore(tmp_path)[1]["step"] == 0


@pytest.mark.parametrize("part", ["state", "feed"])
def test_a_checkpoint_with_a_missing_part_is_refused(part, three, tmp_path, quiet):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    shutil.rmtree(folder / "3" / part)
    with pytest.raises(
        feedline.FeedError, match=rf"cannot be read \({part}/.* is not as it was.*\); remove its folder to go on"
    ):
        restore(folder)
    (folder / "3" / "files.sha256").unlink()
    left = {"state": "feed", "feed": "state"}[part]
    with pytest.raises(ValueError, match=rf"/3 holds {left}: a part was removed, .* remove the folder to go on"):
        restore(folder)
    shutil.rmtree(folder / "3")
    assert restore(folder)[1]["step"] == 2


def test_a_folder_that_holds_nothing_is_refused(tmp_path, quiet):
    (tmp_path / "7").mkdir()
    with pytest.raises(ValueError, match="/7 holds nothing: a part was removed, or something else wrote it"):
        restore(tmp_path)


@pytest.mark.parametrize("between", ["item_metadata", "restore"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads that Orbax gave up
def test_a_checkpoint_that_is_removed_while_it_is_read_is_told(between, three, tmp_path, quiet, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    usual = getattr(ocp.CheckpointManager, between)

    def removed_before(*arguments, **named):
        shutil.rmtree(folder / "3", ignore_errors=True)
        return usual(*arguments, **named)

    monkeypatch.setattr(ocp.CheckpointManager, between, removed_before)
    with pytest.raises((feedline.FeedError, ValueError), match=f"{folder}/3"):
        restore(folder)
    assert restore(folder)[1]["step"] == 2
    gc.collect()  # those reads


def test_a_save_that_fails_does_not_hide_why_the_loop_ended(tmp_path, quiet, monkeypatch):
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


@pytest.mark.parametrize("path", ["feed/metadata", "state/_METADATA", "state/manifest.ocdbt"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads that Orbax gave up
def test_a_damaged_checkpoint_is_told(path, three, tmp_path, quiet):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    damaged = folder / "3" / path
    damaged.write_bytes(damaged.read_bytes()[:20])
    told = rf"cannot be read \({path} is not as it .*\); remove its folder to go on from that of step 2, .*/3\]$"
    with pytest.raises(feedline.FeedError, match=told):
        restore(folder)
    (folder / "3" / "files.sha256").unlink()
    with pytest.raises(feedline.FeedError, match=r"cannot be read \((?s:.*); remove its folder to go on .*/3\]$"):
        restore(folder)
    shutil.rmtree(folder / "3")
    assert restore(folder)[1]["step"] == 2
    gc.collect()  # those reads


def test_a_flipped_bit_changes_no_weight(three, tmp_path, quiet):
    folder, chance, refused, unharmed = tmp_path / "copy", random.Random(5), 0, 0
    shutil.copytree(three, folder)
    expected = values(restore(folder)[0])
    paths = sorted(path for path in (folder / "3").rglob("*") if path.is_file())
    for path in chance.choices(paths, k=30):
        whole = path.read_bytes()
        at = chance.randrange(len(whole) * 8)
        path.write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ 1 << at % 8]) + whole[at // 8 + 1 :])
        try:
            found = values(restore(folder)[0])
        except feedline.FeedError as error:
            told = str(error)
            refused += "is not as it was saved" in told and "to go on from that of step 2, the newest " in told
        else:
            assert_same_bits(found, expected)
            unharmed += 1
        path.write_bytes(whole)
    assert refused + unharmed == 30
    assert refused > 15


def test_another_file_and_older_damage_are_told(three, tmp_path, quiet):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    (folder / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    (folder / "3" / "state" / "d" / "more").write_bytes(b"")
    told = r"\(state/d/more is not as it was saved\); remove .* go on from that of step 1, the newest"
    with pytest.raises(feedline.FeedError, match=told):
        restore(folder)
    shutil.rmtree(folder / "1")
    with pytest.raises(
        feedline.FeedError, match=r"\); no older one is whole; restore it from a copy, or begin again"
    ):
        restore(folder)


def test_a_checkpoint_without_digests_is_restored_with_a_warning(three, tmp_path, caplog):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    assert "digests" not in caplog.text
    (folder / "3" / "files.sha256").unlink()
    assert restore(folder)[1]["step"] == 3
    assert f"{folder / '3'} was saved without digests of its files: damage would not be noticed" in caplog.text


def test_the_digests_are_those_of_sha256sum(three):
    programs.run(["sha256sum", "--check", "--strict", "--quiet", "files.sha256"], cwd=three / "3", check=True)


def test_nothing_is_saved_once_the_loss_is_no_finite_number(tmp_path):
    program = program_of("jit_multi", SMALL)
    with (
        feedline.Feed(ROWS, 64, sharding_of("jit_multi"), order=ORDER) as feed,
        Checkpoints(tmp_path, feed, program.mesh) as checkpoints,
    ):
        state = program.start()
        for loss in (1.0, 2.0, float("nan")):
            state, _ = program.step(state, program.recent(1), next(feed))
            checkpoints.save_if_finite(int(state.step), state, np.float32([[loss, 0]]))
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["1", "2"]
