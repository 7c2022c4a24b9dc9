"""The checks of a feed and of its batches: each with the trouble planted, and without it."""

import json
import os
import sys

import jax
import numpy as np
import programs
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.tools.doctor.batches import Leaf, Values, check_dtypes, check_replicated, check_small_leaves
from feedline._src.tools.doctor.feeds import check_feed_threads, check_prefetch, feed_checks

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(256, size=(640, 32, 32), dtype=np.uint8)


def sound(mesh):
    rows = {"image": IMAGES, "label": np.arange(640, dtype=np.int32) % 10}
    return feedline.Feed(rows, 128, NamedSharding(mesh, P("data")))


def troubled(mesh):
    rows = {"image": IMAGES.astype(np.float32), **{f"m{i}": np.arange(640, dtype=np.int32) for i in range(20)}}
    reading = feedline.Reading(threads=2 * os.cpu_count() + 2)
    return feedline.Feed(rows, 128, NamedSharding(mesh, P()), prefetch=1, reading=reading)


def short(mesh):
    return feedline.Feed({"x": IMAGES}, 640, NamedSharding(mesh, P("data")), epochs=1)


def found(target):
    checks = {check.name: check for check in feed_checks(f"test_feeds:{target}")}
    return checks, {name: check.severity for name, check in checks.items()}


def test_a_sound_feed(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    _, severities = found("sound")
    assert set(severities.values()) == {"ok"}
    assert set(found("short")[1].values()) == {"ok"}


def test_a_troubled_feed(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    checks, severities = found("troubled")
    assert set(severities.values()) == {"warning"}
    assert checks["sharding of the batch"].measured["surplus_bytes"] == 128 * 32 * 32 * 4 * (
        jax.device_count() - 1
    )
    assert checks["dtypes of the batch"].measured["leaves"] == {"['image']": {"dtype": "float32", "fits": "uint8"}}
    assert checks["number of leaves"].measured["small"] == 20


def test_a_target_that_does_not_exist():
    for target in ("no_such_module:make", "os:make_feed"):
        with pytest.raises(ValueError, match="a source is a path, a glob or module:name"):
            list(feed_checks(target))


@pytest.mark.parametrize(
    ("dtype", "values", "narrower"),
    [
        ("float32", [0, 255], "uint8"),
        ("float32", [-1, 1], "int8"),
        ("float32", [0, 300], "uint16"),
        ("float32", [-1, 300], "int16"),
        ("float32", [0, 70000], None),
        ("float32", [0.5, 1], None),
        ("float32", [np.nan, 1], None),
        ("float32", [1 << 24], None),
        ("int32", [0, 9], "uint8"),
        ("int64", [-40000, 9], None),
        ("uint8", [0, 9], None),
        ("bfloat16", [0, 9], None),
        ("float64", [0.5], "float32"),
        ("float64", [7], "uint8"),
        ("bool", [True, False], None),
        ("int32", [], None),
    ],
)
def test_narrower_dtypes(dtype, values, narrower):
    leaf = Leaf("x", (1000, 1000), dtype, values=Values.of(np.array(values, dtype)))
    assert leaf.narrower == narrower
    assert (check_dtypes([leaf]).severity == "warning") == (narrower is not None)


def test_a_leaf_that_saves_little_is_no_problem():
    wide = Leaf("label", (128,), "int32", values=Values(True, 0, 9))
    rest = Leaf("image", (128, 64, 64, 3), "uint8")
    assert check_dtypes([wide, rest]).severity == "ok"
    assert check_dtypes([wide._replace(shape=(128, 512)), rest]).severity == "note"


def test_one_device_says_nothing_about_sharding():
    assert check_replicated([Leaf("x", (64, 64), "float32")]).severity == "unknown"
    assert check_replicated([Leaf("rate", (), "float32", 8, True)]).severity == "ok"


def test_few_or_large_leaves_are_no_problem():
    assert check_small_leaves([Leaf("x", (64, 4), "float32")] * 15).severity == "ok"
    assert check_small_leaves([Leaf("x", (64, 4096), "float32")] * 40).severity == "ok"


def test_options():
    assert [check_prefetch(depth).severity for depth in (0, 1, 2, 4)] == ["warning", "warning", "ok", "ok"]
    assert [check_feed_threads(n, 4).severity for n in (1, 4, 5)] == ["ok", "ok", "warning"]
    assert check_feed_threads(2, 1).severity == "ok"  # the default on one processor


@pytest.mark.slow
def test_the_command_line():
    done = programs.run(
        [sys.executable, "-m", "feedline", "doctor", "test_feeds:troubled", "--cpu-devices", "4", "--json"],
        capture_output=True, text=True, timeout=120, env=programs.importing(),
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    severities = {check["name"]: check["severity"] for check in json.loads(line)["checks"]}
    assert severities["sharding of the batch"] == "warning"
    assert severities["link to the devices"] == "unknown"
    assert done.returncode == (4 if "error" in severities.values() else 3)
