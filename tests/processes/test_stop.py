"""SIGTERM and Ctrl-C with several processes: all save the same step, end with 143 or 130, and resume exactly."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
from launched import FEEDLINE, LAUNCH, PATIENCE_S, launched

pytestmark = pytest.mark.slow

ENDLESS = 1_000_000_000
TRAIN = [*FEEDLINE, "train", "--layers", "1", "--width", "16"]
EXAMPLE = [sys.executable, str(Path(__file__).parents[2] / "examples" / "preemption.py")]
ENDS = [(signal.SIGTERM, 143, "SIGTERM", "terminated"), (signal.SIGINT, 130, "Ctrl-C", "interrupted")]
PIDS = r"\[(\d)\] pid (\d+)\n"


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        environ.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def trained(folder, steps):
    options = ["--checkpoint-dir", folder, "--steps", steps, "--save-every", ENDLESS, "--json"]
    return [*TRAIN, *map(str, options)]


def ended_by(number, command, ready):
    """Signals the launcher once a line of output matches `ready`. Returns its exit code, output and seconds."""
    with programs.started(
        [*LAUNCH, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert any(re.search(ready, line) for line in launcher.stdout)
        launcher.send_signal(number)
        began = time.monotonic()
        out, _ = launcher.communicate(timeout=PATIENCE_S)
    return launcher.returncode, out, time.monotonic() - began


def test_all_processes_save_the_same_step_and_training_resumes_exactly(tmp_path, measured):
    """Training that is stopped and resumed twice has the result of training that is never stopped."""
    before = 0
    for number, code, name, ended in ENDS:
        found, out, seconds = ended_by(number, trained(tmp_path / "a", ENDLESS), f"step {before + 1:,} of")
        assert found == code, out
        measured("SIGTERM or Ctrl-C to `feedline launch`", seconds)
        assert f"[0] feedline: the loop ends after this step; a second {name} ends the process at once\n" in out
        (said,) = re.findall(rf"feedline: {ended} after step ([\d,]+), which is saved", out)
        step = int(said.replace(",", ""))
        assert step > before
        assert str(step) in [path.name for path in (tmp_path / "a").iterdir()]
        before = step
    resumed, whole = (launched(*trained(tmp_path / folder, step + 5)) for folder in ("a", "b"))
    results = [
        json.loads(line.removeprefix("[0] "))
        for done in (resumed, whole)
        for line in done.stdout.splitlines()
        if line.startswith("[0] {")
    ]
    assert results[0]["steps"] == 5
    assert results[0]["state"] == results[1]["state"]
    assert results[0]["final_loss"] == results[1]["final_loss"]


def test_a_signal_to_one_process_ends_the_loop_of_all(tmp_path, measured):
    """The program calls `should_stop` in its own loop. The signal goes to process 1."""
    tell = ["sh", "-c", 'echo "pid $$"; exec "$@"', "-", *EXAMPLE, str(tmp_path / "a"), str(ENDLESS)]
    with programs.started([*LAUNCH, *tell], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        pids, trains = {}, False
        for line in launcher.stdout:
            pids |= {int(process): int(pid) for process, pid in re.findall(PIDS, line)}
            trains |= "training" in line
            if trains and len(pids) == 2:
                break
        os.kill(pids[1], signal.SIGTERM)
        began = time.monotonic()
        out, err = launcher.communicate(timeout=PATIENCE_S)
    measured("SIGTERM to one process of several", time.monotonic() - began)
    assert launcher.returncode == 143, err
    (step,) = re.findall(r"\[0\] stopped after step (\d+)", out)
    results = [launched(*EXAMPLE, str(tmp_path / name), str(int(step) + 5)).stdout for name in ("a", "b")]
    ends = [re.findall(r"\[0\] (ended after .*)", result) for result in results]
    assert ends[0] == ends[1]
    assert ends[0][0].startswith(f"ended after step {int(step) + 5}, ")


def test_without_checkpoints_sigterm_ends_all_immediately(measured):
    code, out, seconds = ended_by(signal.SIGTERM, [*TRAIN, "--steps", str(ENDLESS)], "step 1 of")
    assert code == 143
    assert "was killed by signal 15 (Terminated), after SIGTERM had been forwarded" in out
    measured("SIGTERM without checkpoints", seconds)


LOOP_THAT_NEVER_ASKS = (
    "import feedline, threading\n"
    "feedline.cluster.initialize()\n"
    "print('ready', flush=True)\n"
    "threading.Event().wait()\n"
)


def test_a_second_sigterm_kills_a_program_that_does_not_call_should_stop(measured):
    """jax catches SIGTERM, and the program goes on."""
    command = [*LAUNCH, sys.executable, "-c", LOOP_THAT_NEVER_ASKS]
    with programs.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert sum("ready" in line for line in (launcher.stdout.readline() for _ in range(2))) == 2
        launcher.send_signal(signal.SIGTERM)
        assert any("SIGTERM caught" in line for line in launcher.stderr)
        launcher.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, err = launcher.communicate(timeout=PATIENCE_S)
    measured("SIGTERM twice, to a program that never calls `should_stop`", time.monotonic() - began)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "after SIGTERM, SIGTERM had been forwarded" in err


WITH_WORKERS = (
    "import os, signal, sys\n"
    "import jax, numpy as np\n"
    "import feedline\n"
    "def main():\n"
    "    np.save(sys.argv[1], np.arange(40_000))\n"
    "    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])\n"
    "    feed = feedline.Feed(sys.argv[1], 8, device, reading=feedline.Reading(workers=2))\n"
    "    stopped = 0\n"
    "    for step, _ in enumerate(feed):\n"
    "        if step == 5:\n"
    "            os.killpg(os.getpgid(0), signal.SIGTERM)\n"
    "        stopped += feedline.cluster.should_stop(step)\n"
    "        if stopped == 200:\n"
    "            break\n"
    "    feed.close()\n"
    "    print('read on')\n"
    "if __name__ == '__main__':\n"
    "    main()\n"
)


def test_worker_processes_keep_reading_after_the_signal(tmp_path):
    """Slurm, `feedline launch` and a terminal's Ctrl-C send the signal to every process of a job."""
    (tmp_path / "script.py").write_text(WITH_WORKERS)
    done = programs.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "rows.npy"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, "read on\n"), done.stderr
