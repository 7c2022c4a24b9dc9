"""The logs of `fit`, read back by the csv module and TensorBoard: resumes, later names, errors, Ctrl-C."""

import csv
import errno
import math
import os
import resource
import socket
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from limits import limited

import feedline
from feedline._src.trainer import logs
from feedline.trainer import CSVLog, Progress, TensorBoardLog, fit, mesh_for

X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
LOGS = [CSVLog, TensorBoardLog]


def report(step, resumed=0, **metrics):
    """A report of a run with 10 rows in each step and, after the first step, 100 rows/s."""
    done = step - resumed
    metrics = metrics or {"loss": 1 / step}
    return Progress(step, metrics, resumed, 10 * done, (done - 1) / 10, 10 * (done - 1), (done - 1) / 40)


def table(path):
    """Each line of a CSV file as a dict of strings."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = list(csv.reader(text.splitlines()))
    assert {len(line) for line in lines} == {len(lines[0])}
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def steps(path):
    return [int(line["step"]) for line in table(path)]


def scalars(folder):
    """{name: {step: value}} that TensorBoard shows of a folder. Checks that no step of a name comes twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = {
        name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    for pairs in found.values():
        assert [step for step, _ in pairs] == sorted({step for step, _ in pairs})
    return {name: dict(pairs) for name, pairs in found.items()}


def fit_with(callbacks, **options):
    def loss(params, batch):
        error = batch["x"] @ params - 1
        return jnp.mean(error**2), {"distance": jnp.mean(abs(error))}

    sharding = NamedSharding(mesh_for("jit_multi"), P("data"))
    with (
        feedline.Feed({"x": X}, 40, sharding) as feed,
        feedline.Feed({"x": X[:40]}, 40, sharding, epochs=1) as test,
    ):
        return fit(
            feed, lambda key: jnp.zeros(3), loss, optax.sgd(0.1), callbacks=callbacks,
            evaluation=test, evaluate_every=20, **options,
        )  # fmt: skip


def interrupt(progress):
    """A callback that acts as Ctrl-C after the report of step 30."""
    if progress.step == 30:
        raise KeyboardInterrupt


def assert_logged(history, folder):
    """Both logs hold exactly this history."""
    lines = table(folder / "log.csv")
    assert list(lines[0])[:5] == ["step", "loss", "distance", "rows_per_s", "wait_share"]
    assert set(lines[0]) - {"rows_per_s", "wait_share"} == {name for entry in history for name in entry}
    rates = {"rows_per_s", "wait_share"}
    assert [
        {name: float(cell) for name, cell in line.items() if cell and name not in rates} for line in lines
    ] == history
    shown = scalars(folder / "events")
    assert set(shown) == {*lines[0]} - {"step"}
    for name in shown.keys() - rates:
        expected = {entry["step"]: np.float32(entry[name]) for entry in history if name in entry}
        assert shown[name] == expected
    for name in rates:
        cells = {int(line["step"]): float(line[name]) for line in lines if line[name]}
        assert shown[name] == pytest.approx(cells, rel=1e-6)
        assert not {1, 21} & cells.keys()  # no rates of steps that compile
        assert all(cell >= 0 for cell in cells.values())


@pytest.mark.slow
def test_both_logs_hold_the_history_also_of_a_run_that_was_interrupted_and_resumed(tmp_path):
    with CSVLog(tmp_path / "log.csv") as table_log, TensorBoardLog(tmp_path / "events") as events_log:
        whole = fit_with([table_log, events_log], steps=45)
    assert [entry["step"] for entry in whole.history] == [1, 10, 20, 30, 40, 45]
    assert_logged(whole.history, tmp_path)

    folder = tmp_path / "resumed"
    run = {"steps": 45, "checkpoint_dir": tmp_path / "checkpoints", "save_every": 20}
    with CSVLog(folder / "log.csv") as table_log, TensorBoardLog(folder / "events") as events_log:
        with pytest.raises(KeyboardInterrupt):
            fit_with([table_log, events_log, interrupt], **run)
        assert steps(folder / "log.csv") == [1, 10, 20, 30]
    with CSVLog(folder / "log.csv") as table_log, TensorBoardLog(str(folder / "events")) as events_log:
        rest = fit_with([table_log, events_log], **run)
    assert rest.progress.resumed == 20
    assert [entry["step"] for entry in rest.history] == [21, 30, 40, 45]
    assert_logged([*whole.history[:3], *rest.history], folder)
    assert len(list((folder / "events").iterdir())) == 2


def logged(log, path):
    return steps(path) if log is CSVLog else list(scalars(path)["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_one_log_may_serve_several_runs(log, tmp_path):
    path = tmp_path / "log.csv"
    with log(path) as opened:
        assert list(tmp_path.iterdir()) == []  # nothing is made before the first report
        for step, resumed in [(1, 0), (20, 0), (30, 0), (21, 20), (30, 20)]:
            opened(report(step, resumed))
        assert logged(log, path) == [1, 20, 21, 30]
        opened.close()
        opened(report(31, resumed=30))  # opens the file again
        assert logged(log, path) == [1, 20, 21, 30, 31]
        opened(report(1))
    opened.close()
    assert logged(log, path) == [1]


def test_a_line_is_in_the_file_when_the_callback_returns(tmp_path):
    with CSVLog(str(tmp_path / "new" / "folder" / "log.csv")) as log:
        for step in (1, 10, 20):
            log(report(step))
            assert steps(tmp_path / "new" / "folder" / "log.csv")[-1] == step
    assert table(tmp_path / "new" / "folder" / "log.csv") == [
        {"step": "1", "loss": "1.0", "rows_per_s": "", "wait_share": ""},
        {"step": "10", "loss": "0.1", "rows_per_s": "100.0", "wait_share": "0.25"},
        {"step": "20", "loss": "0.05", "rows_per_s": "100.0", "wait_share": "0.25"},
    ]


def test_a_name_that_appears_later_is_a_new_column(tmp_path):
    path = tmp_path / "log.csv"
    with CSVLog(path) as log:
        log(report(1, loss=1.0))
        log(report(10, loss=2.0, eval_loss=3.0))
        log(report(20, loss=4.0))
        log(report(30, loss=math.nan, eval_loss=5.0, **{'of "a", b': 6.0}))
    lines = table(path)
    assert list(lines[0]) == ["step", "loss", "rows_per_s", "wait_share", "eval_loss", 'of "a", b']
    cells = [(line["loss"], line["eval_loss"], line['of "a", b']) for line in lines]
    assert cells == [("1.0", "", ""), ("2.0", "3.0", ""), ("4.0", "", ""), ("nan", "5.0", "6.0")]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_new_run_has_only_its_own_columns(tmp_path):
    for metrics in ({"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0}):
        with CSVLog(tmp_path / "log.csv") as log:
            log(report(1, **metrics))
    assert table(tmp_path / "log.csv") == [{"step": "1", "loss": "2.0", "rows_per_s": "", "wait_share": ""}]


@pytest.mark.parametrize("cut", ["12,0.3", "12,0.3,10.0,0.2"])
def test_a_line_that_was_cut_off_is_removed(cut, tmp_path):
    path = tmp_path / "log.csv"
    with CSVLog(path) as log:
        log(report(10))
    with path.open("a") as file:
        file.write(cut)
    with CSVLog(path) as log:
        log(report(21, resumed=20))
    assert steps(path) == [10, 21]


@pytest.mark.parametrize(
    "content",
    [
        b"image,label\n1,2\n",
        b"image,label",
        b"step,loss\n1,2\n",
        b"\xff\x00",
        pytest.param(b"x" * 200_000, id="long"),
        "device",
        "folder",
    ],
)
def test_what_is_no_log_is_refused_and_left_alone(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("mine.csv")
    with socket.socket(socket.AF_UNIX) as device:  # not /dev/null, which a log would replace
        if content == "device":
            device.bind(str(path))
        elif content == "folder":
            path.mkdir()
        else:
            path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"mine.csv is not a log: a log is a file with the columns step, rows_per_s, w"
        ):
            CSVLog(path)(report(1))
        assert isinstance(content, str) or path.read_bytes() == content


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_ctrl_c_while_the_file_is_written_anew_keeps_the_old_one(tmp_path, monkeypatch, at):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with CSVLog(tmp_path / "log.csv") as log:
        log(report(1))
        monkeypatch.setattr(*((logs.os, at) if at == "fsync" else (Path, at)), interrupted)
        with pytest.raises(KeyboardInterrupt):
            log(report(10, loss=1.0, eval_loss=1.0))
    assert steps(tmp_path / "log.csv") == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_a_run_that_goes_on_after_an_error_of_the_log_has_each_step_once(log, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, written = tmp_path / "log.csv", (logs.os, "fsync") if log is CSVLog else (log, "_append")
    with log(path) as opened:
        for step in (10, 20, 30):
            opened(report(step))
    with log(path) as opened:
        for failing, next_step in ((report(21, resumed=20), 30), (report(40, 20, loss=0.0, eval_loss=1.0), 50)):
            with monkeypatch.context() as during:
                during.setattr(*written, full)
                with pytest.raises(OSError, match="No space left on device"):
                    opened(failing)
            opened(report(next_step, resumed=20))
    assert logged(log, path) == [10, 20, 30, 50]


@pytest.mark.parametrize("log", LOGS)
def test_a_folder_that_cannot_be_written_is_named(log, tmp_path):
    (tmp_path / "file").write_text("")
    with log(tmp_path / "file" / "log.csv") as opened:
        with pytest.raises(
            OSError, match=r"the log .*/file/log.csv cannot be written: (File exi|Not a d).*/file\b"
        ):
            opened(report(1))
        (tmp_path / "file").unlink()
        opened(report(1))
    assert (tmp_path / "file" / "log.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_a_full_disk_is_named_and_what_was_written_stays_whole(log, tmp_path):
    path = tmp_path / "log.csv"
    with log(path) as opened:
        opened(report(1))
        opened(report(10))
        file = path if path.is_file() else next(path.iterdir())
        before = file.read_bytes()
        told = pytest.raises(OSError, match=r"the log .*/log.csv cannot be written: File too large$")
        with told, limited(resource.RLIMIT_FSIZE, len(before) + 7):  # room for a part of a record
            opened(report(20))
        assert file.read_bytes() == before
        opened(report(30))
    assert logged(log, path) == [1, 10, 30]
