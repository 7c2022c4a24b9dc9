"""The doctor's checks of a machine, a feed and a batch: what they say of troubled ones and of sound ones."""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import programs
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_machine import tree

import feedline
from feedline._src.machine import topology
from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor import checks
from feedline._src.tools.doctor.checks import Leaf, fitting


def leaf(shape, dtype, **values):
    return Leaf("x", shape, dtype, math.prod(shape) * np.dtype(dtype).itemsize, **values)


SMALL, IMAGE = leaf((128,), "int32", fits=["uint8"]), leaf((128, 64, 64, 3), "uint8")


@pytest.mark.parametrize(
    ("check", "arguments", "severity", "words"),
    [
        (checks.threads_and_processors, (64, 4.0), "warning", "grants 4 processors, but libraries count 64"),
        (checks.threads_and_processors, (1, None), "warning", "1 processors"),
        (checks.threads_and_processors, (64, None), "ok", "64 processors"),
        (checks.threads_and_processors, (64, 64.0), "ok", "64 processors"),
        (checks.free_memory, (64 << 30, 1 << 30), "warning", "1 GiB of the 64 GiB"),
        (checks.free_memory, (64 << 30, 8 << 30), "ok", "8 GiB of the 64 GiB"),
        (checks.disk_read_rate, (500e6, 5.0, 1), "warning", "100 MB/s"),
        (checks.disk_read_rate, (500e6, 1.0, 1), "ok", "500 MB/s"),
        (checks.disk_read_rate, (500e6, 1.0, 8), "warning", "on 8 H100 reads 1,640 MB/s"),
        (checks.disk_read_rate, (1e5, 0.1, 1), "unknown", "less than 1 MiB"),
        (checks.dtypes, ([SMALL, IMAGE],), "ok", ""),
        (checks.dtypes, ([leaf((128, 512), "int32", fits=["uint8"]), IMAGE],), "note", "fits uint8"),
        (checks.sharding, ([leaf((64, 64), "float32")],), "unknown", "one device"),
        (checks.sharding, ([leaf((), "float32", devices=8, replicated=True)],), "ok", ""),
        (checks.number_of_leaves, ([leaf((64, 4), "float32")] * 15,), "ok", "15 of 15"),
        (checks.number_of_leaves, ([leaf((64, 4), "float32")] * 16,), "warning", "16 of 16"),
        (checks.number_of_leaves, ([leaf((64, 4096), "float32")] * 40,), "ok", "0 of 40"),
    ],
)
def test_a_check_judges_what_was_measured(check, arguments, severity, words):
    found = check(*arguments)
    assert (found.severity, words in found.finding) == (severity, True), found
    assert found.fix
    assert found.why


def test_gpus_that_jax_does_not_use(tmp_path):
    assert checks.devices("cpu", tmp_path, {}).severity == "ok"
    tree(
        tmp_path,
        {
            f"proc/driver/nvidia/gpus/0000:{i}1:00.0/information": f"Device Minor: {i}\nGPU UUID: GPU-{i}"
            for i in range(8)
        },
    )
    found = checks.devices("cpu", tmp_path, {"JAX_PLATFORMS": "cpu"})
    assert found.severity == "error"
    assert "the driver lists 8 NVIDIA GPUs; JAX_PLATFORMS=cpu" in found.finding
    assert "docker run --gpus" in found.fix  # as in a container that sees the driver, but none of its devices
    tree(tmp_path, {"dev/nvidia0": ""})
    assert checks.devices("cpu", tmp_path, {"JAX_PLATFORMS": "cpu"}).fix.startswith("unset JAX_PLATFORMS")
    assert "jax[cuda13]" in checks.devices("cpu", tmp_path, {}).fix
    assert checks.devices("gpu", tmp_path, {}).severity == "ok"


def numa(root, memory, gpus):
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{32 * n}-{32 * n + 31}\n" for n in (0, 1)}
    files["proc/self/status"] = f"Name:\tpython\nMems_allowed_list:\t{memory}\n"
    for i, (kind, node) in enumerate([*(("0x030200", node) for node in gpus), ("0x020000", 1)]):  # a network card
        folder = f"sys/bus/pci/devices/0000:{i}1:00.0"
        files |= {f"{folder}/class": kind, f"{folder}/vendor": "0x10de", f"{folder}/numa_node": str(node)}
    return topology(tree(root, files))


@pytest.mark.parametrize(
    ("allowed", "memory", "gpus", "expected"),
    [
        (range(32), "0-1", [1, 1], "warning"),
        (range(32), "1", [], "warning"),
        (range(32), "0", [0, 1], "note"),
        (range(32), "0-1", [0], "ok"),
        (range(64), "0-1", [0, 1], "ok"),
        (range(32), "0-1", [-1], "ok"),
    ],
)
def test_affinity(allowed, memory, gpus, expected, tmp_path):
    found = numa(tmp_path, memory, gpus)
    assert found.processors == {0: frozenset(range(32)), 1: frozenset(range(32, 64))}
    assert len(found.accelerators) == len(gpus)
    assert checks.affinity(frozenset(allowed), found).severity == expected
    one_node = found._replace(processors={0: frozenset(range(64))})
    assert checks.affinity(frozenset(allowed), one_node).severity == "ok"


def test_reading_is_bounded(tmp_path):
    files = [tmp_path / f"{i}.bin" for i in range(3)]
    for file in files:
        file.write_bytes(bytes(20 << 20))
    assert checks.read_rate(files, seconds=math.inf)[0] == 60 << 20
    assert checks.read_rate(files, most=24 << 20, seconds=math.inf)[0] == 28 << 20  # a file of 20 and a block of 8
    assert checks.read_rate(files, seconds=0)[0] == 8 << 20


def test_each_check_of_the_machine_is_in_the_table(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.bin").write_bytes(bytes(2 << 20))
    found = {check.name: check for check in checks.machine_findings({}, tmp_path)}
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    assert not [name for name in found if f"| {name} |" not in page]
    assert "failed" not in str(found)
    assert found["disk read rate"].severity in ("ok", "warning")


# --- feeds and batches ---

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(256, size=(640, 32, 32), dtype=np.uint8)


def sound(mesh):
    rows = {"image": IMAGES, "label": np.arange(640, dtype=np.int32) % 10}
    return feedline.Feed(rows, 128, NamedSharding(mesh, P("data")))


def troubled(mesh):
    rows = {"image": IMAGES.astype(np.float32), **{f"m{i}": np.arange(640, dtype=np.int32) for i in range(20)}}
    return feedline.Feed(rows, 128, NamedSharding(mesh, P()))


def short(mesh):
    return feedline.Feed({"x": IMAGES}, 640, NamedSharding(mesh, P("data")), epochs=1)


def test_sound_and_troubled_feeds(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    for target in ("sound", "short"):
        assert {each.severity for each in checks.feed_findings(f"test_checks:{target}")} == {"ok"}
    found = {each.name: each for each in checks.feed_findings("test_checks:troubled")}
    assert {each.severity for each in found.values()} == {"warning"}
    surplus = in_bytes(128 * 1024 * 4 * 7)
    assert f"on each of 8 devices: {surplus} more" in found["sharding of the batch"].finding
    assert found["dtypes of the batch"].finding.startswith("in 3 batches ['image'] is float32 and fits uint8: ")
    assert found["number of leaves"].finding.startswith("20 of 21 leaves are below 64 KiB: ")


@pytest.mark.parametrize(
    ("dtype", "values", "narrower"),
    [
        ("float32", [0, 255], "uint8"),
        ("float32", [-1, 300], "int16"),
        ("float32", [0, 70000], None),
        ("float32", [np.nan, 1], None),
        ("int32", [0, 9], "uint8"),
        ("uint8", [0, 9], None),
        ("bfloat16", [0, 9], None),
        ("float64", [0.5], "float32"),
        ("int32", [], None),
    ],
)
def test_narrower_dtypes(dtype, values, narrower):
    assert Leaf.of("x", np.array(values, dtype)).narrower == narrower


def test_a_narrower_dtype_holds_the_values_of_all_batches():
    small, large = np.array([0, 9], np.int32), np.array([0, 900], np.int32)
    assert Leaf.of("x", large, Leaf.of("x", small)).narrower == "uint16"
    assert Leaf.of("x", small, Leaf.of("x", large)).narrower == "uint16"
    assert fitting(small, []) == []


@pytest.mark.slow
def test_a_jax_that_cannot_start_is_a_finding():
    done = programs.run(
        [sys.executable, "-m", "feedline", "doctor", "--json"],
        capture_output=True, text=True, timeout=120, env=programs.importing(JAX_PLATFORMS="cuda"),
    )  # fmt: skip
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["devices that JAX uses"]
    assert (done.returncode, found["severity"]) == (4, "error")
    assert "JAX runs on no device (" in found["finding"]


@pytest.mark.slow
def test_the_command_line():
    done = programs.run(
        [sys.executable, "-m", "feedline", "doctor", "test_checks:troubled", "--cpu-devices", "4", "--json"],
        capture_output=True, text=True, timeout=120, env=programs.importing(),
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    severities = {check["name"]: check["severity"] for check in json.loads(line)["checks"]}
    assert severities["sharding of the batch"] == "warning"
    assert done.returncode == (4 if "error" in severities.values() else 3)
