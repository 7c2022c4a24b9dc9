"""`feedline inspect`: what it prints, the examples in docs/tools.md, and what it refuses."""

import os
import re
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P

from feedline._src.tools.inspect.command import Inspect
from feedline._src.tools.main import main

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "tools.md").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with files of 100 rows, of one row and of none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    np.savez("rows.npz", x=np.arange(600, dtype=np.float32).reshape(100, 6), y=np.arange(100))
    np.save("one.npy", np.zeros((1, 3), np.float32))
    np.save("empty.npy", np.zeros((0, 3), np.float32))
    return tmp_path


# --- what it says ---


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["inspect"], "\x1b]0;title\a.npy"),
        (["convert"], "mirrored\u202e.npy"),
        (["inspect"], "not_utf8\udcff.npy"),
    ],
)
def test_no_control_character_of_a_name_reaches_the_terminal(here, capsys, command, name):
    rest = ["out"] if command == ["convert"] else []
    assert main([*command, name, *rest]) == 2  # the file does not exist yet
    with open(os.fsencode(name), "wb") as file:
        np.save(file, np.arange(16))
    assert main([*command, name, *rest]) == 0
    told = capsys.readouterr()
    assert all(each.isprintable() for each in (told.out + told.err).replace("\n", ""))
    assert ascii(name)[1:-1] in told.err
    assert rest or told.out.startswith(f"{ascii(name)[1:-1]}: 16 rows")


def test_figures_by_hand(here):
    """A row has 24 + 8 bytes in the file, and 24 + 4 on devices. 16 rows, 4 × 2 devices, 2 processes."""
    found = Inspect("rows.npz", mesh="data=4,model=2", spec="data,model", processes=2, batch_size=16).target()
    plan = found.plan
    assert (plan.problems, plan.rows, dict(found.mesh.shape)) == ((), 100, {"data": 4, "model": 2})
    assert {name: (leaf.shape, leaf.dtype, leaf.sharding.spec) for name, leaf in plan.leaves.items()} == {
        "batch['x']": ((16, 6), np.float32, P("data", "model")),
        "batch['y']": ((16,), np.int32, P("data")),
    }
    assert found.first[0][1].tolist() == [6, 7, 8, 9, 10, 11]
    assert [*plan.memory] == [3 * 8 * 28, 7 * 8 * 28, 3 * 8 * 8, 0, 4 * 4 * 16]
    assert plan.epoch == (16, 6, 4, 7, 12)  # steps, left out, padded steps, padding
    assert (plan.multiple_of, plan.next_sizes()) == (4, [12, 20])
    assert [[*reads.rows] for reads in plan.reads] == [[*range(8)], [*range(8, 16)]]


@pytest.mark.slow
def test_a_mesh_that_this_machine_does_not_have(here):
    options = "--mesh data=32,model=2 --processes 64 --batch-size 1024 --remainder pad"
    command = [sys.executable, "-W", "error", "-m", "feedline", "inspect", "rows.npz", *options.split()]
    done = programs.run(command, capture_output=True, text=True, check=True, cwd=here)
    lines = done.stdout.splitlines()
    assert "Mesh data=32, model=2: 64 devices in 64 processes, 1 in each." in lines
    assert len(lines) < 75
    assert max(map(len, lines)) <= 80


FEEDS = """
import grain, numpy as np, feedline
from jax.sharding import NamedSharding, PartitionSpec

rows = {"x": np.zeros((100, 4))}
lanes = feedline.Lanes(lambda lane, count: grain.MapDataset.range(lane, 90, count).to_iter_dataset(), 4)

def make_feed(mesh):
    feedline.Feed({"y": np.zeros(50)}, 8, NamedSharding(mesh, PartitionSpec())).close()  # another one
    return feedline.Feed(rows, 16, NamedSharding(mesh, PartitionSpec("data")), remainder="pad")

def other_axis(mesh):
    return feedline.Feed(rows, 16, NamedSharding(mesh, PartitionSpec("fsdp")))

def other_order(mesh):
    return feedline.Feed(rows, 16, NamedSharding(mesh, PartitionSpec("data")), order=7)

def none(mesh):
    return None
"""


@pytest.fixture
def feeds(here, monkeypatch):
    (here / "feeds_for_inspect.py").write_text(FEEDS)
    yield "feeds_for_inspect"
    monkeypatch.delitem(sys.modules, "feeds_for_inspect", raising=False)


def test_a_feed_of_ones_own(feeds):
    found = Inspect(f"{feeds}:make_feed", mesh="data=4", prefetch=5, buffer=7).target()
    settings = found.plan.settings
    assert (found.plan.batch_size, found.plan.remainder, settings.prefetch, settings.buffer) == (16, "pad", 5, 7)
    assert [*found.plan.leaves] == ["batch['valid']", "batch['x']"]
    on_all = Inspect(f"{feeds}:make_feed").target()
    assert dict(on_all.mesh.shape) == {"data": len(jax.devices()), "model": 1}
    refused = Inspect(f"{feeds}:make_feed", mesh="data=3").target().plan
    assert refused.fitting_size == 15
    assert "multiple of the 3 shards of the batch axis, got 16; 15 or 18 would work" in refused.problems[0]


def test_a_stream(feeds, capsys):
    plan = Inspect(f"{feeds}:lanes", mesh="data=2", processes=2).target().plan
    assert (plan.rows, plan.lanes, plan.epoch) == (None, 4, None)
    assert [[*reads.lanes] for reads in plan.reads] == [[0, 1], [2, 3]]
    assert main(["inspect", f"{feeds}:lanes", "--mesh", "data=2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a stream of 4 lanes, items of 8 B. Their number is known only once all are read." in text


# --- docs/tools.md ---


def shown_on_the_page():
    return re.findall(r"^```\n\$ (feedline inspect .*)\n\n?((?s:.*?))^```$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "output"), shown_on_the_page(), ids=lambda text: text[:60])
def test_the_page_shows_what_the_command_prints(command, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    main(shlex.split(command)[1:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output.splitlines()


# --- what it refuses ---


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("missing.npy", "there is no file missing.npy; check the path"),
        ("empty.npy", "a source must have at least one row, got none in empty.npy"),
        ("rows.npz --mesh data=4 --processes 3", "processes must divide the 4 devices of the mesh into equal"),
        ("rows.npz --mesh data=4 --batch-size 0", "batch_size must be at least 1, got 0"),
        ("rows.npz --mesh data=2,model=4 --spec data,model", "batch['x']: the size of axis 1 must be a multiple"),
        ("rows.npz --columns z", "z"),
        ("feeds_for_inspect:rows --columns x", "--columns is for a path"),
        ("feeds_for_inspect:rows --mesh data=16", "--cpu-devices must be set before jax is imported"),
        ("rows.npy --mesh data=1024,model=1025", "at most 1,048,576 devices, got 'data=1024,model=1025'"),
        ("feeds_for_inspect:rows --mesh data=64,model=65", "at most 4,096 devices for module:name, got 4,160"),
        ("nothing:here", "a source is a path, a glob or module:name, and loading nothing:here failed with Modul"),
        ("feeds_for_inspect:make_feed --spec data", "feeds_for_inspect:make_feed shards the batch itself. Leave"),
        ("feeds_for_inspect:none", "feeds_for_inspect:none must build a feedline.Feed and return it"),
        ("feeds_for_inspect:other_axis", "fsdp"),
        ("feeds_for_inspect:other_order", "order must be a feedline.Order or None, got 7"),
    ],
)
def test_what_is_wrong(arguments, told, feeds, capsys):
    assert main(["inspect", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("rows.npz --mesh data=4 --batch-size 102", "of the 4 shards of the batch axis, got 102; 100 or 104"),
        ("one.npy --mesh data=8", "1 row cannot fill one of 8; use fewer shards of the batch axis"),
    ],
)
def test_what_a_feed_refuses_is_said_first(arguments, told, here, capsys):
    assert main(["inspect", *arguments.split()]) == 1
    printed = capsys.readouterr().out
    assert told in " ".join(printed.partition(".np")[0].split())
    assert "Epochs and batch sizes" in printed


def test_rows_that_cannot_be_read(here, capsys):
    (here / "broken_rows.py").write_text(
        "class Rows:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, row): return {'x': 1.0 / (row - 1)}\n"
        "rows = Rows()\n"
    )
    assert main(["inspect", "broken_rows:rows", "--mesh", "data=1"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
