"""`feedline diagnose -- command` with unchanged scripts: what it prints, and how it ends."""

import json
import os
import subprocess
import sys

import programs
import pytest

from feedline._src.tools.main import main

pytestmark = pytest.mark.slow

SCRIPT = """
import subprocess, sys, time
from pathlib import Path

import jax, numpy as np, feedline

rows = {"x": np.zeros((4096, 8), np.float32)}
test = feedline.Feed(rows, 512, jax.devices()[0], epochs=1)
feed = feedline.Feed(rows, 64, jax.devices()[0], transform=lambda batch, rows: (time.sleep(0.2), batch)[1],
                     reading=feedline.Reading(threads=1))
assert len(list(test)) == 8  # as many as --after: this is not the feed of the loop
subprocess.run([sys.executable, "-c", "import jax"])  # a process whose feeds deliver nothing
try:
    for step, batch in zip(range(int(sys.argv[1])), feed):
        time.sleep(0.002)
finally:
    Path("saved").write_text("weights")
"""


@pytest.fixture
def diagnosed(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*options, steps, script="train.py", launcher=(), stdout=subprocess.PIPE):
        job = [*launcher, sys.executable, script, str(steps)]
        command = [sys.executable, "-m", "feedline", "diagnose", *options, "--", *job]
        return programs.run(command, cwd=tmp_path, stdout=stdout, stderr=subprocess.PIPE, text=True)

    return run


def test_a_script_is_diagnosed_and_ends_before_it_saves_anything(diagnosed, tmp_path):
    done = diagnosed("--steps", "80", "--json", steps=100_000)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("a step takes ")
    assert not (tmp_path / "saved").exists()
    found = json.loads(last)
    assert set(found["diagnosis"]) == {"steps_s", "first_batch_s", "au", "stalls_s"}
    assert found["diagnosis"]["stalls_s"]["preparation"] > 0.1 > found["diagnosis"]["steps_s"]["resident"]
    assert len(found["processes"]) == 1


SEVERAL = """
import time
import jax, numpy as np, feedline
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

feedline.cluster.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
feed = feedline.Feed({"x": np.zeros((4096, 8), np.float32)}, 48, sharding)
for batch in feed:
    time.sleep(0.002 + 0.01 * jax.process_index())
"""


def test_all_processes_of_a_run_are_diagnosed(diagnosed, tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    launch = [sys.executable, "-m", "feedline", "launch", "--processes", "3", "--cpu"]
    launch += ["--devices-per-process", "1", "--"]
    done = diagnosed("--steps", "60", "--json", launcher=launch, script="several.py", steps=0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["processes"]) == 3
    assert "no answer from process 0" not in done.stderr


def test_it_ends_before_it_saves_anything_even_if_nobody_reads_what_it_prints(diagnosed, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed:
        done = diagnosed("--steps", "80", steps=100_000, stdout=closed)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "BrokenPipeError: [Errno 32] Broken pipe")
    assert not (tmp_path / "saved").exists()


def test_a_loop_that_ends_early_tells_what_was_seen(diagnosed, tmp_path):
    done = diagnosed("--steps", "80", steps=8 + 50)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").exists()
    assert "not measured: placed again, resident" in done.stdout


ONE_BATCH_A_PASS = """
import sys, jax, numpy as np, feedline

feed = feedline.Feed({"x": np.zeros((64, 8), np.float32)}, 64, jax.devices()[0], epochs=1)
for epoch in range(int(sys.argv[1])):
    list(feed)
"""


def test_a_feed_of_one_batch_a_pass_is_diagnosed(diagnosed, tmp_path):
    (tmp_path / "one.py").write_text(ONE_BATCH_A_PASS)
    done = diagnosed("--steps", "40", script="one.py", steps=100)
    assert (done.returncode, done.stdout[:13]) == (0, "a step takes "), done.stderr


def test_without_a_loop_over_a_feed_it_says_so(diagnosed):
    done = diagnosed(steps=3)
    assert done.returncode == 2
    assert "took more than --after 8 batches from a feedline.Feed: at most 8 were asked for; let" in done.stderr
    assert diagnosed(steps=0, script="missing.py").returncode == 2  # Python's own exit code


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "diagnose runs a command: feedline diagnose -- python train.py"),
        (["--steps", "0", "--", "true"], "--steps must be at least 1 and --after at least 0, got 0, 8"),
        (["--", "no-such-program"], "no-such-program"),
        (["--", sys.executable, "-c", "import jax"], "from a feedline.Feed: none was asked for; let it run"),
        (["--", sys.executable, "-c", ""], "no process imported jax through PYTHONPATH"),
    ],
)
def test_wrong_use_is_an_error_with_a_fix(options, told, capsys):
    assert main(["diagnose", *options]) == 2
    assert told in capsys.readouterr().err
